"""Helpers for tests of blocks: a net runs beside its oracle, with the gradients of both."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxfleet import fluid
from jaxfleet.runtime import Scope
from tests.fluid.nets import fresh

Array = np.ndarray[Any, Any]
Build = Callable[[], fluid.Variable]


def gradients(
    build: Build, feed: Mapping[str, Any], values: Mapping[str, Array], wrt: Sequence[str] = ()
) -> dict[str, Array]:
    """Builds a net and returns its loss, and gradients by name.

    Args:
        build: adds the net to the program, returns its loss.
        feed: the feeds.
        values: of parameters.
        wrt: names of feeds whose gradients are wanted besides those of all parameters.
    """
    with fresh() as (main, startup), fluid.scope_guard(Scope()):
        main.random_seed = startup.random_seed = 1
        loss = build()
        pairs = {p.name: g for p, g in fluid.backward.append_backward(loss)}
        found = {name: main.global_block().var(name + "@GRAD") for name in wrt}
        exe = fluid.Executor()
        if startup.global_block().ops:
            exe.run(startup)
        for name, value in values.items():
            variable = fluid.global_scope().find_var(name)
            assert variable is not None
            variable.get_tensor().set(value, fluid.CPUPlace())
        wanted = {"loss": loss, **pairs, **found}
        made = exe.run(main, feed=dict(feed), fetch_list=list(wanted.values()))
        return dict(zip(wanted, map(np.asarray, made), strict=True))


def same(left: Mapping[str, Array], right: Mapping[str, Array], **how: Any) -> None:
    """Checks that two nets have the same loss and gradients."""
    assert left.keys() == right.keys()
    for name, value in left.items():
        np.testing.assert_allclose(
            value, right[name], err_msg=name, **{"rtol": 2e-5, "atol": 1e-6, **how}
        )
