"""docs/strategy.md lists all options, and the modes that read them."""

import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.runtime.pserver_job import timeouts_of
from jaxfleet.strategy import MODES, DistributedStrategy

PAGE = Path(__file__).resolve().parents[2] / "docs" / "strategy.md"
OPTIONS = {field.name: field for field in dataclasses.fields(DistributedStrategy)}
TX = jf.distributed_optimizer(optax.sgd(0.1))
STATE, BATCH = jnp.ones((4, 2)), np.ones((8, 4), np.float32)
# Read at the start of ranks or servers in several processes, and tested there.
OF_PROCESSES = {
    "collective": {"batch", "lost_after_s", "step_timeout_s"},
    "pserver": {"replay_bytes"},
}
# Read for other modes.
ON_THE_WAY = {"single": {"lowering", "hierarchical", "adaptive", "outer"}}


def rows() -> dict[str, list[str]]:
    lines = [x for x in PAGE.read_text(encoding="utf-8").splitlines() if x.startswith("| `")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return {cell[0].strip("`"): cell for cell in cells}


def modes_of(cell: str) -> set[str]:
    return set(MODES) if cell == "all" else set(cell.split(", "))


def type_text(field: Any) -> str:
    text = str(field.type) if not isinstance(field.type, type) else field.type.__name__
    choices = re.fullmatch(r"typing\.Literal\[(.*)\]", text)
    return choices[1].replace(", ", " | ") if choices else text.replace("typing.", "")


def test_the_page_lists_every_option_with_its_type_and_default_in_the_codes_order() -> None:
    listed = rows()
    assert list(listed) == list(OPTIONS)
    for name, (_, kind, default, _, what) in listed.items():
        assert kind.strip("`").replace("\\|", "|") == type_text(OPTIONS[name]), name
        assert default.strip("`") == repr(OPTIONS[name].default), name
        assert len(what) > 20, name


class Noting(DistributedStrategy):
    """Records the options that are read after its construction."""

    read: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> Any:
        if name in OPTIONS:
            Noting.read.add(name)
        return super().__getattribute__(name)


def train_step(w: Any, batch: Any) -> tuple[Any, Any]:
    loss, grads = jax.value_and_grad(lambda w: jnp.mean(jnp.square(batch @ w - 1)))(w)
    updates, _ = TX.update(grads, TX.init(w), w)
    return optax.apply_updates(w, updates), loss


def on_devices(strategy: Noting) -> None:
    jf.distribute(train_step, (STATE, BATCH), strategy)(STATE, BATCH)


def over_servers(strategy: Noting) -> None:
    jf.Twin(train_step, (STATE, BATCH), strategy).run(STATE, [BATCH])
    timeouts_of(strategy)


RUNS: dict[str, list[tuple[Callable[[Noting], None], dict[str, Any]]]] = {
    "single": [(on_devices, {}), (on_devices, {"amp": "float16"})],
    "collective": [
        (on_devices, {}),
        (on_devices, {"amp": "float16"}),
        (on_devices, {"communication": "local_sgd", "adaptive": "metrics", "k_steps": 2}),
    ],
    "pserver": [
        (over_servers, {}),
        (over_servers, {"communication": "fl"}),
        (over_servers, {"on_trainer_lost": "wait"}),
        (over_servers, {"communication": "dc_asgd"}),
    ],
}


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", MODES)
def test_the_page_lists_for_a_mode_what_a_step_reads_there(mode: Any) -> None:
    found: set[str] = set()
    for run, options in RUNS[mode]:
        devices = 2 if mode == "collective" else None
        strategy = Noting(mode=mode, devices=devices, donate=False, **options)
        Noting.read.clear()
        run(strategy)
        found |= Noting.read
    found = (found | OF_PROCESSES.get(mode, set())) - ON_THE_WAY.get(mode, set())
    documented = {name for name, row in rows().items() if mode in modes_of(row[3])}
    assert found | {"mode"} == documented


def test_the_classs_own_documentation_has_every_option_too() -> None:
    text = inspect.getdoc(DistributedStrategy) or ""
    assert [name for name in OPTIONS if not re.search(rf"^    {name}: ", text, re.MULTILINE)] == []


def test_a_strategy_shows_what_was_chosen() -> None:
    strategy = DistributedStrategy(mode="pserver", merge=2)
    assert repr(strategy) == "DistributedStrategy(mode='pserver', merge=2)"
    assert repr(DistributedStrategy()) == "DistributedStrategy()"
