"""The example of `docs/fluid.md` runs unchanged."""

import re
from pathlib import Path

import numpy as np

from jaxfleet import fluid
from jaxfleet.runtime import Scope
from tests.fluid.nets import fresh

PAGE = Path(__file__).parents[2] / "docs" / "fluid.md"


def test_the_example_trains_a_line() -> None:
    code, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    random = np.random.default_rng(0)
    rows = random.normal(size=(32, 13)).astype(np.float32)
    names = {"rows": rows, "wanted": rows.sum(1, keepdims=True)}
    with fresh() as (main, _), fluid.scope_guard(Scope()):
        exec(compile(code, str(PAGE), "exec"), names)  # noqa: S102  # our own page
        exe, loss = fluid.Executor(), names["loss"]
        feed = {"x": names["rows"], "y": names["wanted"]}
        losses = [exe.run(main, feed=feed, fetch_list=[loss])[0][0] for _ in range(100)]
    assert float(names["value"][0]) > losses[0] > 5 * losses[-1]
