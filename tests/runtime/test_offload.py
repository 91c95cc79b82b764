"""Values that wait in pinned host memory: real transfers, and bitwise equal results."""

import gc
import re
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.analysis.memory import memory_profile
from jaxfleet.analysis.memory.costs import bytes_of
from jaxfleet.errors import PassError, StrategyError, UnsupportedError
from jaxfleet.ir import Program
from jaxfleet.lower import ExecutableCache, host_transfer
from jaxfleet.lower.staged import Peak
from jaxfleet.passes import Offload, Recompute
from jaxfleet.runtime.memory_fit import Fit, Fitting, Memory

LAYERS, ROWS, WIDTH = 8, 256, 64
CUT, MOVED = "recompute", "recompute,offload{smallest_bytes=1024}"


def built(rows: int = ROWS) -> tuple[Any, Any]:
    """Returns a step of equal layers whose updates wait for a norm, and its example."""
    tx = jf.distributed_optimizer(
        optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9))
    )
    rng = np.random.default_rng(0)
    params = [(0.2 * rng.standard_normal((WIDTH, WIDTH))).astype(np.float32) for _ in range(LAYERS)]

    def train_step(state: Any, batch: Any) -> Any:
        params, opt_state = state

        def loss_of(params: Any) -> Any:
            h = batch["x"]
            for w in params:
                h = h + jnp.tanh(h @ w)
            return jnp.mean((h - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    batch = {name: rng.standard_normal((rows, WIDTH)).astype(np.float32) for name in "xy"}
    return train_step, ((params, tx.init(params)), batch)


def step_of(made: tuple[Any, Any], devices: int = 1, **options: Any) -> Any:
    return jf.distribute(*made, jf.DistributedStrategy(devices=devices, **options))


def two_steps(step: Any, made: Any) -> list[np.ndarray]:
    """Returns the state and all losses after two steps."""
    state, batch = made[1]
    state, first = step(jax.tree.map(jnp.array, state), batch)
    state, second = step(state, batch)
    return [np.asarray(x) for x in jax.tree.leaves((state, first, second))]


def left_on_host() -> list[jax.Array]:
    gc.collect()
    return [x for x in jax.live_arrays() if x.sharding.memory_kind == host_transfer.PINNED]


class Seen:
    """The results of moves: name and kind of memory."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.moved: list[tuple[str, str | None]] = []
        self._start = host_transfer.start_moves
        for place in ("lower.staged", "ps.client.trainer_executor"):
            patch.setattr(f"jaxfleet.{place}.start_moves", self.start)

    def start(self, asked: Any, values: dict[str, Any]) -> Any:
        leaving = self._start(asked, values)
        for move in asked:
            before, after = values[move.of].sharding, values[move.to].sharding
            assert before.with_memory_kind(after.memory_kind) == after  # on the same devices
            self.moved.append((move.to, after.memory_kind))
        return leaving


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(monkeypatch)


@pytest.mark.grid
@pytest.mark.parametrize("devices", [1, 4])
def test_what_waits_is_on_the_host_and_no_bit_changes(seen: Seen, devices: int) -> None:
    made = built(devices * ROWS)
    cut, step = (step_of(made, devices, passes=passes) for passes in (CUT, MOVED))
    wanted = two_steps(cut, made)
    assert not seen.moved
    found = two_steps(step, made)
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(x, y)
    usual = jax.devices()[0].default_memory().kind
    said = [op for op in step.program.root.ops if op.type in host_transfer.MOVES]
    kinds = [(op.writes[0], host_transfer.PINNED if op.type == "to_host" else usual) for op in said]
    assert seen.moved == 2 * kinds  # and nothing else
    waiting = {op.reads[0] for op in said if op.type == "to_host"}
    assert sum(name.endswith("@GRAD") for name in waiting) >= 4  # they wait for their norm
    assert len(waiting) >= 8
    assert not left_on_host()
    before, after = cut.memory_report(), step.memory_report()
    assert after.after_bytes < 0.7 * before.after_bytes
    assert after.host_bytes > before.after_bytes - after.after_bytes
    assert before.host_bytes == 0
    assert "in its pinned memory; of a CPU, that is the same memory" in str(after)
    count = f"{len(waiting)} values wait in pinned memory of the host"
    assert count in step.explain()
    assert count not in cut.explain()


@pytest.mark.grid
def test_a_budget_is_met_with_values_on_the_host() -> None:
    made = built()
    step = step_of(made, memory_budget=0.35, offload=True)
    report = step.memory_report()
    assert report.fit is not None
    assert isinstance(report.fit.passes[-1], Offload)
    assert report.after_bytes <= report.fit.budget
    assert report.host_bytes > 0
    assert "wait on the host" in str(report)
    for x, y in zip(two_steps(step, made), two_steps(step_of(made), made), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)  # other executables, other sums


@dataclass(frozen=True)
class Modelled(Memory):
    """A program's memory by the model alone: nothing is compiled."""

    is_apart: bool = False

    @property
    def host_is_apart(self) -> bool:
        return self.is_apart

    @property
    def fetched(self) -> tuple[str, ...]:
        return ()

    @property
    def runs(self) -> tuple[Any, ...]:
        return ()

    @property
    def sizes(self) -> dict[str, int]:
        return {"b": ROWS}

    def peak(self) -> Peak:
        root = self.program.root
        sent = [op.writes[0] for op in root.ops if op.type == "to_host"]
        on_host = sum(bytes_of(root.variables[name], self.sizes) for name in sent)
        peak = memory_profile(self.program, self.sizes).peak
        return Peak(peak, 0, {}, 0, (peak,), on_host)


def fit(program: Program, budget: int, *, offload: bool | None, apart: bool = False) -> Fit:
    memory = Modelled(program, jax.devices()[0], apart)
    return Fitting(memory, lambda made: replace(memory, program=made), offload).to(budget)


def least(program: Program, **options: Any) -> int:
    """Returns the smallest budget, as named by a rejection."""
    with pytest.raises(StrategyError, match="cannot be made to take") as refused:
        fit(program, 1000, **options)
    found = re.findall(r"made to take is ([\d,]+); as it is", "".join(refused.value.__notes__))
    return int(found[0].replace(",", ""))


@pytest.mark.grid  # ten seconds of planning; the test above covers such a budget
def test_values_wait_on_the_host_where_nothing_else_meets_a_budget_or_where_asked_for() -> None:
    program = step_of(built()).program
    alone, lower = least(program, offload=False), least(program, offload=True)
    assert lower < 0.9 * alone
    with pytest.raises(StrategyError, match="cannot be made to take"):
        fit(program, lower, offload=None)  # on a CPU both memories are one
    found = fit(program, lower, offload=None, apart=True)
    assert found.after is not None
    assert found.after.bytes <= lower
    assert found.after.host_bytes > 0
    assert [pass_.name for pass_ in fit(program, alone, offload=True).passes][-1] == "offload"
    met = fit(program, alone, offload=None, apart=True)  # by recomputing forward
    assert "offload" not in [pass_.name for pass_ in met.passes]
    moved = fit(Recompute().run(program), alone, offload=True)
    assert moved.note.startswith("as it is cut; ")


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = built()
    with pytest.raises(PassError, match="is one executable, and values move between them"):
        step_of(made, offload=True)
    with pytest.raises(StrategyError, match="offload is 'yes'"):
        step_of(made, offload="yes")
    with pytest.raises(StrategyError, match="memory_budget with lowering 'pmap'"):
        step_of(made, 4, memory_budget=0.5, lowering="pmap")
    with pytest.raises(StrategyError, match="lowering 'pmap' with passes that cut"):
        step_of(made, 4, passes=CUT, lowering="pmap")
    another: Any = SimpleNamespace(process_index=jax.process_index() + 1)
    with pytest.raises(UnsupportedError, match="devices of several processes do not move"):
        host_transfer.check_moves(step_of(made, passes=MOVED).program, [another])
    monkeypatch.setattr(host_transfer, "memory_kinds", lambda _: ("device", "unpinned_host"))
    with pytest.raises(UnsupportedError, match="no memory of the kind 'pinned_host'") as refused:
        step_of(made, passes=CUT, offload=True)
    assert "it has device, unpinned_host" in "".join(refused.value.__notes__)
    assert not host_transfer.host_memory_is_apart(jax.devices()[0])


@pytest.mark.grid
def test_trainers_move_values_and_let_go_of_what_was_not_chosen(seen: Seen) -> None:
    made = built()
    state, batch = made[1]
    found = []
    for passes in (CUT, MOVED):
        twin = jf.Twin(
            made[0], made[1], jf.DistributedStrategy(mode="pserver", passes=passes), trainers=2
        )
        result = twin.run(state, [batch, batch])
        found.append(jax.tree.leaves((result.states, result.metrics)))
    for x, y in zip(*found, strict=True):
        np.testing.assert_array_equal(x, y)
    assert {kind for name, kind in seen.moved if name.endswith("@HOST")} == {host_transfer.PINNED}
    assert not left_on_host()
    cache = ExecutableCache()
    strategy = jf.DistributedStrategy(mode="pserver", memory_budget=0.5, offload=True)
    job = jf.Twin(*made, strategy, trainers=2, cache=cache).programs()
    assert job.fit is not None
    assert job.fit.after is not None
    assert job.fit.after.host_bytes > 0
    assert len(cache.runs()) < cache.compiled
