"""Servers save their distributed tables, and restore them on any number of servers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.checkpoint import open_checkpoint
from jaxfleet.checkpoint.tables import saved_tables
from jaxfleet.errors import CheckpointError, ProgramError, SavedError
from jaxfleet.fluid import io
from jaxfleet.fluid.pserver import checkpoint_notify
from tests.fluid.nets import fresh
from tests.fluid.pserver.jobs import Feed, Script, run_job, shared_out
from tests.fluid.pserver.memory import Job
from tests.fluid.pserver.test_distributed_table import DIM, batches, net

RANDOM = partial(net, begins=fluid.initializer.Uniform(-1.0, 1.0))
STEPS = 4

Then = Callable[[fluid.Executor, fluid.Program, int], None]  # after this many steps of trainer 0


@dataclass
class Saved:
    """A job of several servers and trainers with an action after each step of trainer 0."""

    folder: Path
    then: Then
    servers: int = 2
    load: bool = False
    build: Callable[[], fluid.Variable] = RANDOM
    config: dict[str, Any] = field(default_factory=dict)

    def run(self, feeds: Sequence[Sequence[Feed]]) -> list[list[float]]:
        """Returns the losses of every trainer."""
        endpoints = [f"127.0.0.1:{7501 + n}" for n in range(self.servers)]
        script = Script(Job(), self.build, endpoints, len(feeds), config=self.config)
        people: dict[str, Any] = {
            f"server {n}": partial(self._serve, script, n) for n in range(self.servers)
        }
        people |= {
            f"trainer {n}": partial(self._train, script, n, fed) for n, fed in enumerate(feeds)
        }
        done = script.job.run(people)
        return [done[f"trainer {n}"] for n in range(len(feeds))]

    def _serve(self, script: Script, number: int) -> None:
        main, startup = script.transpiled()[0].get_pserver_programs(script.endpoints[number])
        exe, scope = script.executor(), fluid.Scope()
        exe.run(startup, scope=scope)
        if self.load:
            with fluid.scope_guard(scope):
                io.load_persistables(exe, self.folder, main)
        exe.run(main, scope=scope)

    def _train(self, script: Script, number: int, fed: Sequence[Feed]) -> list[float]:
        transpiler, startup, loss = script.transpiled(number)
        main, exe, scope = transpiler.get_trainer_program(), script.executor(), fluid.Scope()
        exe.run(startup, scope=scope)
        losses = []
        for step, batch in enumerate(fed):
            found = exe.run(main, feed=dict(batch), fetch_list=[loss], scope=scope)
            losses.append(float(found[0][0]))
            if number == 0:
                with fluid.scope_guard(scope):
                    self.then(exe, main, step + 1)
        exe.close()
        return losses


def nothing(*_: Any) -> None:
    """Does nothing after a step."""


def save_after(steps: int, folder: Path) -> Then:
    def then(exe: fluid.Executor, main: fluid.Program, step: int) -> None:
        if step == steps:
            io.save_persistables(exe, folder, main)

    return then


@pytest.mark.few(1)
@pytest.mark.parametrize("servers", [1, 3])
def test_a_job_with_a_distributed_table_goes_on_from_its_save_on_any_number_of_servers(
    tmp_path: Path, servers: int
) -> None:
    far = np.array([-1, 0, 1 << 32, -(1 << 63), (1 << 63) - 1, 7 << 40])
    build = partial(RANDOM, 1 << 40)
    feeds = shared_out(batches(STEPS, ids=far), 2)
    whole = Saved(tmp_path, save_after(2, tmp_path), build=build).run(feeds)
    rest = Saved(tmp_path, nothing, servers, load=True, build=build).run([f[2:] for f in feeds])
    assert rest == [losses[2:] for losses in whole]


def test_a_save_where_trainers_do_not_wait_has_what_its_trainer_sent(tmp_path: Path) -> None:
    fed = batches(STEPS)
    config = {"sync_mode": False}
    whole = Saved(tmp_path, save_after(2, tmp_path), config=config).run([fed])
    rest = Saved(tmp_path, nothing, load=True, config=config).run([fed[2:]])
    assert rest == [whole[0][2:]]


@pytest.mark.grid
def test_one_process_goes_on_with_a_table_that_servers_have_saved(tmp_path: Path) -> None:
    fed = batches(STEPS)
    whole = Saved(tmp_path, save_after(2, tmp_path)).run([fed])
    exe, scope = fluid.Executor(fluid.CPUPlace()), fluid.Scope()
    with fresh() as (main, startup), fluid.scope_guard(scope):
        loss = RANDOM(distributed=False)
        exe.run(startup)
        io.load_persistables(exe, tmp_path, main)
        rest = [float(exe.run(main, feed=dict(x), fetch_list=[loss])[0][0]) for x in fed[2:]]
    np.testing.assert_allclose(rest, whole[0][2:], rtol=1e-5)
    with fresh() as (main, startup), fluid.scope_guard(fluid.Scope()):
        RANDOM(10, distributed=False)
        exe.run(startup)
        with pytest.raises(SavedError, match=r"'emb' has ids from \d+ to \d+"):
            io.load_persistables(exe, tmp_path, main)


def notify(exe: fluid.Executor, folder: Path, endpoints: Sequence[str], table: str) -> None:
    """Runs `checkpoint_notify`, as fluid's own `fluid.io` does."""
    program = fluid.Program()
    attrs = {"epmap": list(endpoints), "dir": str(folder), "lookup_table": table}
    program.global_block().append_op(type="checkpoint_notify", attrs=attrs)
    exe.run(program)


def test_a_checkpoint_notice_without_endpoints_does_nothing(tmp_path: Path) -> None:
    notify(fluid.Executor(fluid.CPUPlace()), tmp_path, [], "")
    assert not list(tmp_path.iterdir())


def test_servers_that_are_notified_write_the_rows_that_were_looked_up(tmp_path: Path) -> None:
    fed = batches(2, ids=np.arange(12))

    def then(exe: fluid.Executor, main: fluid.Program, step: int) -> None:
        if step < 2:
            return
        endpoints = main._endpoints
        notify(exe, tmp_path, endpoints, "emb")
        with pytest.raises(ProgramError, match=r"leaves out 127\.0\.0\.1:7502"):
            notify(exe, tmp_path, endpoints[:1], "emb")
        with pytest.raises(ProgramError, match="no table 'other' here"):
            notify(exe, tmp_path, endpoints, "other")
        with pytest.raises(ProgramError, match="no program here connected to it"):
            notify(exe, tmp_path, ["127.0.0.1:1"], "emb")

    Saved(tmp_path, then).run([fed])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["emb"]
    checkpoint = open_checkpoint(tmp_path / "emb")
    keys, rows = saved_tables([checkpoint])["emb"].export()
    looked_up = np.unique([x[name] for x in fed for name in ("ids0", "ids1")])
    np.testing.assert_array_equal(keys, looked_up)
    assert rows.shape == (len(keys), DIM)
    assert [part.record.part for part in checkpoint.parts] == ["server 0", "server 1"]


@pytest.mark.grid
def test_what_cannot_be_saved_leaves_the_save_before_it_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = batches(STEPS)

    def fail(*_: Any, **__: Any) -> None:
        raise CheckpointError("the disk is full")

    def then(exe: fluid.Executor, main: fluid.Program, step: int) -> None:
        if step == 2:
            io.save_persistables(exe, tmp_path, main)
        if step == 3:
            monkeypatch.setattr(checkpoint_notify, "commit", fail)
            with pytest.raises(CheckpointError, match="the disk is full"):
                notify(exe, tmp_path / "__lookup_table__", main._endpoints, "emb")

    whole = Saved(tmp_path, then).run([fed])
    folder = tmp_path / "__lookup_table__" / "emb"
    assert len([path for path in folder.iterdir() if path.name.startswith("part-")]) == 2
    rest = Saved(tmp_path, nothing, load=True).run([fed[2:]])
    assert rest == [whole[0][2:]]


def test_a_damaged_table_is_not_loaded(tmp_path: Path) -> None:
    Saved(tmp_path, save_after(1, tmp_path)).run([batches(1)])
    (tmp_path / "__lookup_table__" / "emb" / "checkpoint.json").write_bytes(b"{}")
    script = Script(Job(), RANDOM, ["a:1", "b:2"], 1)
    main = script.transpiled()[0].get_pserver_program("a:1")
    with pytest.raises(CheckpointError, match=r"checkpoint\.json"):
        io.load_persistables(script.executor(), tmp_path, main)


def test_recv_save_writes_a_variable_of_servers_whole(tmp_path: Path) -> None:
    found = {}

    def then(exe: fluid.Executor, main: fluid.Program, step: int) -> None:
        if step < 2:
            return
        program, path = fluid.Program(), tmp_path / "w"
        (part,) = [x for x in main._parameters_on_pservers.distributed_vars if x.origin.name == "w"]
        attrs = {
            "endpoints": [part.endpoint], "remote_varnames": [part.slice.name],
            "shape": list(part.origin.shape), "file_path": str(path), "overwrite": False,
        }  # fmt: skip
        program.global_block().append_op(type="recv_save", attrs=attrs)
        exe.run(program)
        with pytest.raises(SavedError, match="shall not overwrite"):
            exe.run(program)
        found["w"] = np.array(fluid.global_scope()["w"])

    Saved(tmp_path, then).run([batches(2)])
    with fresh() as (main, _):
        RANDOM(distributed=False)
        variable = main.global_block().var("w")
    with fluid.scope_guard(fluid.Scope()):
        io.load_vars(fluid.Executor(fluid.CPUPlace()), tmp_path, vars=[variable])
        np.testing.assert_array_equal(np.array(fluid.global_scope()["w"]), found["w"])


def test_a_server_that_serves_again_goes_on_with_its_rows_until_it_begins_anew() -> None:
    fed = batches(2)
    script = Script(Job(), RANDOM, ["127.0.0.1:7501"], 1)
    main, startup = script.transpiled()[0].get_pserver_programs("127.0.0.1:7501")
    exe, scope = script.executor(), fluid.Scope()

    people: dict[str, Callable[[], Any]] = {
        "server": lambda: exe.run(main, scope=scope),
        "trainer": lambda: run_trainer(script, fed),
    }
    exe.run(startup, scope=scope)
    losses = [script.job.run(people)["trainer"] for _ in range(2)]
    wanted = run_job(RANDOM, [[*fed, *fed]], servers=1).losses[0]
    assert [*losses[0], *losses[1]] == wanted
    exe.run(startup, scope=scope)
    assert not scope.rows


def run_trainer(script: Script, fed: Sequence[Feed]) -> list[float]:
    transpiler, startup, loss = script.transpiled()
    main, exe, scope = transpiler.get_trainer_program(), script.executor(), fluid.Scope()
    exe.run(startup, scope=scope)
    ran = [exe.run(main, feed=dict(x), fetch_list=[loss], scope=scope)[0][0] for x in fed]
    exe.close()
    return [float(value) for value in ran]
