"""Work that may take long says what it is, whoever watches: see `Progress`."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.ir import parse
from jaxfleet.observability import Progress
from jaxfleet.observability import progress as progress_module
from jaxfleet.observability.progress import LiveLine
from tests.runtime.toys import rows, start, training


def train_step(w: Any, x: Any) -> tuple[Any, Any]:
    return w - 0.1 * x.T @ (x @ w), jnp.mean(x)


class Paper:
    """A screen that keeps what was drawn, without times."""

    def __init__(self) -> None:
        self.drawn: list[str] = []

    def draw(self, text: str, share: float | None) -> None:
        del share
        self.drawn.append(text.rpartition(" (")[0])

    def clear(self) -> None:
        self.drawn.append("")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every change of the line, drawn at once instead of after 2 s."""
    paper = Paper()
    line = LiveLine(lambda: paper, every_s=None)
    monkeypatch.setattr(progress_module, "_SHARED", line)
    show = Progress.show

    def shown(self: Progress, text: str) -> None:
        monkeypatch.setattr(self, "_quiet_s", 0.0)
        show(self, text)
        line.tick()

    monkeypatch.setattr(Progress, "show", shown)
    return paper.drawn


def example() -> tuple[Any, Any]:
    return jnp.ones((3, 2)), jnp.ones((4, 3))


def test_a_step_shows_its_capture_passes_and_first_calls(drawn: list[str]) -> None:
    step: Any = jf.distribute(train_step, example(), "single")
    whole = ["distribute 'train_step': capturing it", "distribute 'train_step': running its passes"]
    assert drawn == [*whole, ""]
    drawn.clear()
    state, _ = step(*example())
    state, _ = step(state, example()[1])
    first = ["running its passes", "compiling and running it"]
    assert drawn == [*(f"first call of 'train_step': {text}" for text in first), ""]


def test_a_failed_call_leaves_no_line(drawn: list[str]) -> None:
    step: Any = jf.distribute(train_step, example(), "single")
    with pytest.raises(jf.errors.FeedError):
        step(example()[0], jnp.ones((4, 5)))
    assert drawn[-2:] == ["first call of 'train_step': running its passes", ""]


def test_a_report_shows_that_it_compiles(drawn: list[str]) -> None:
    step: Any = jf.distribute(train_step, example(), "single")
    drawn.clear()
    step.memory_report()
    step.as_text()
    assert drawn[0] == "memory_report of 'train_step': compiling it"
    assert drawn[-2:] == ["'train_step': compiling it", ""]


def test_verify_shows_which_run_goes_on(drawn: list[str]) -> None:
    tx = jf.distributed_optimizer(optax.sgd(0.1))
    assert jf.verify(training(tx), start(tx), [rows(8)]).agrees
    runs = ["capturing it", "training on 2 servers and 2 trainers", "training on one device"]
    said = [text.partition(": ")[2] for text in drawn if text.startswith("verify ")]
    assert list(dict.fromkeys(said)) == runs
    assert drawn[-1] == ""


def test_the_first_run_of_a_program_is_shown(drawn: list[str]) -> None:
    program = parse(
        "program p\n  data x: f32[2]\n  block 0\n    forward\n"
        "      y: f32[2] = scale(x) {scale=2.0}"
    )
    executor = jf.Executor()
    for _ in range(2):
        (found,) = executor.run(program, feed={"x": np.ones(2, np.float32)}, fetch=["y"])
        assert found.tolist() == [2.0, 2.0]
    assert drawn == ["first run of 'p': compiling and running it", ""]
