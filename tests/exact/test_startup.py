"""Startup of a job: startup programs of many kinds of steps, and the state that they move."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxfleet.ir import Kind, Operator, Program, parse, verify
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.trainer_executor import run_startup
from jaxfleet.runtime.checkpointing import on_host
from jaxfleet.runtime.simulated_job import Twin
from jaxfleet.runtime.trainer_step import TrainerStep
from jaxfleet.transport.messages import Kind as Message
from jaxfleet.transport.messages import Tensor
from tests.exact.common import Cut, assert_same, executables, prepared
from tests.exact.test_twin_equality import CORE, MORE, OTHERS
from tests.tiers import by_default, grid

CUT = Cut(servers=2, min_block_size=8, trainers=2)
CUTS = (CUT, Cut(3, 1, "balanced", 2), Cut(2, 0, "hash_name", 2))
MOVED = ("mlp", "cnn_batchnorm", "transformer", "rbg", "adafactor", "schedule")
CHECKED = (*MOVED, "gan", "embedding", "clipping_outside", "freeze", "loss_scaling", "dropout")


def twin_of(name: str, cut: Cut = CUT) -> Twin:
    return Twin(
        prepared(name).captured,
        strategy=cut.strategy,
        servers=cut.servers,
        trainers=cut.trainers,
        cache=executables(),
    )


def leaves(program: Program) -> set[str]:
    return {variable.name for variable in program.of_kind(Kind.PARAM, Kind.STATE)}


def ops_of(program: Program, op_type: str) -> list[Operator]:
    return [op for op in program.root.ops if op.type == op_type]


def sent_to(program: Program, endpoint: str) -> set[str]:
    """Returns the variables that a startup program sends to a server."""
    pairs = [
        pair
        for op in ops_of(program, "send")
        for pair in zip(op.reads, op.attrs["epmap"], strict=True)  # type: ignore[arg-type]
    ]
    return {name for name, at in pairs if at == endpoint}


def check(name: str) -> None:
    """Fails unless the startup programs of a step match the programs that run after them."""
    twin = twin_of(name)
    first, second = twin.programs(0), twin.programs(1)
    programs = (first.trainer_startup, second.trainer_startup, *first.server_startups)
    for program in programs:
        verify(program)
        assert parse(str(program)) == program
    state = {leaf.name for leaf in prepared(name).captured.signature.state}
    assert leaves(first.trainer_startup) == state
    assert leaves(second.trainer_startup) == leaves(second.trainer)
    assert not ops_of(second.trainer_startup, "send")
    for startup, server in zip(first.server_startups, first.servers, strict=True):
        taken = {name for op in ops_of(startup, "recv") for name in op.writes}
        assert taken == sent_to(first.trainer_startup, str(startup.attrs["endpoint"]))
        kept = set(map(str, startup.attrs.get("keeps", ())))  # type: ignore[arg-type]
        assert taken == leaves(startup) == leaves(server) | kept
        assert not kept & leaves(server)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", by_default((*CORE, *OTHERS), *CHECKED))
def test_startup_programs_bring_servers_and_trainers_what_their_programs_have(name: str) -> None:
    check(name)


@pytest.mark.grid
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MORE)
def test_startup_programs_of_all_other_steps(name: str) -> None:
    check(name)


@dataclass
class Shelf:
    """A fake client: stores the values given to servers, and returns them."""

    me: SimpleNamespace
    held: dict[tuple[int, str], np.ndarray] = field(default_factory=dict)
    given: list[int] = field(default_factory=list)

    def request(
        self,
        server: int,
        kind: Message,
        *,
        tensors: Iterable[Tensor] = (),
        wants: Sequence[str] = (),
        sink: Callable[[Sequence[Tensor]], None] | None = None,
        body: Mapping[str, object] | None = None,
    ) -> None:
        if kind is Message.ASSIGN:
            assert body == {"replace": False}
            self.given.append(server)
            self.held.update({(server, x.name): x.array.copy() for x in tensors})
        for name in wants:
            assert sink is not None
            sink([Tensor(name, self.held[server, name])])

    def wait(self, _: Sequence[object]) -> None:
        """Returns at once: nothing is pending."""


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "cut"),
    [
        (name, cut) if number % len(CUTS) == turn % len(CUTS) else grid(name, cut)
        for number, name in enumerate(MOVED)
        for turn, cut in enumerate(CUTS)
    ],
    ids=str,
)
def test_a_state_that_was_cut_and_joined_is_the_state(name: str, cut: Cut) -> None:
    twin, signature = twin_of(name, cut), prepared(name).captured.signature
    given = jax.tree.leaves(prepared(name).built.state)
    arrays = {leaf.name: on_host(x) for leaf, x in zip(signature.state, given, strict=True)}
    shelf = Shelf(SimpleNamespace(trainer=0, trainers=2, endpoints=twin.endpoints))
    first, second = twin.programs(0), twin.programs(1)
    for program in (first.trainer_startup, second.trainer_startup):
        taken = run_startup(program, shelf, arrays)  # type: ignore[arg-type]
        assert taken.keys() == leaves(second.trainer)
        for leaf, value in taken.items():
            found, wanted = on_host(value), arrays[leaf]
            assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), leaf
            assert found.tobytes() == wanted.tobytes(), leaf
    assert sorted(shelf.given) == list(range(cut.servers))  # each has a state then, possibly empty


@pytest.mark.grid
def test_a_job_begins_with_what_its_startup_programs_say(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[tuple[int, Message, int], set[str]] = {}
    request = Client.request

    def watched(self: Client, server: int, kind: Message, **options: Any) -> Any:
        if kind in {Message.ASSIGN, Message.PULL} and self.step == 0:
            names = [tensor.name for tensor in options.get("tensors", ())]
            key = (self.me.trainer, kind, server)
            assert key not in seen
            seen[key] = {*names, *options.get("wants", ())}
        return request(self, server, kind, **options)

    monkeypatch.setattr(Client, "request", watched)
    ready, twin = prepared("cnn_batchnorm"), twin_of("cnn_batchnorm")
    steps: list[TrainerStep] = []

    def script(step: TrainerStep) -> Any:
        steps.append(step)
        step(ready.built.state, ready.batches[0])
        return None, ()

    twin.play(script)
    first, _ = sorted(steps, key=lambda step: step.client.me.trainer)
    for server, startup in enumerate(first.server_startup_programs):
        assert seen[0, Message.ASSIGN, server] == leaves(startup)
        assert seen[0, Message.PULL, server] == seen[1, Message.PULL, server]
    pulled = set().union(*(names for key, names in seen.items() if key[1] is Message.PULL))
    assert pulled == {x for op in ops_of(first.startup_program, "recv") for x in op.writes}
    assert {key[0] for key in seen if key[1] is Message.ASSIGN} == {0}


@pytest.mark.grid
def test_all_trainers_begin_with_the_state_of_trainer_0() -> None:
    ready, twin = prepared("cnn_batchnorm"), twin_of("cnn_batchnorm")

    def script(step: TrainerStep) -> Any:
        state = ready.built.state
        if step.client.me.trainer:
            state = jax.tree.map(lambda x: x + 1, state)
        state, _ = step(state, ready.batches[0])
        return step.pull(state), ()

    found = twin.play(script).states
    wanted = twin.run(ready.built.state, ready.batches[:1]).states[0]
    assert_same(found[0], wanted, "on trainer 0")
    assert_same(found[1], wanted, "on trainer 1")


def test_startup_programs_are_dumped_where_the_others_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXFLEET_DUMP_DIR", str(tmp_path))
    job = twin_of("mlp").programs()
    for program in (job.trainer_startup, *job.server_startups):
        text = (tmp_path / program.name / "full/01_insert_startup.txt").read_text()
        assert parse(text) == program
