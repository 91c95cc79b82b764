"""Every pass of a fluid program is dumped: one folder per resulting program."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.cli import main
from jaxfleet.env import dumping_to
from jaxfleet.fluid import layers
from jaxfleet.fluid.contrib.mixed_precision import use_mixed_precision
from jaxfleet.ir import parse
from jaxfleet.report import build_report, read_folders
from tests.fluid.nets import fresh

FEED = {"x": np.ones((4, 4), np.float32)}


def net() -> fluid.Variable:
    hidden = layers.fc(fluid.data("x", [None, 4]), 8, act="relu", name="hidden")
    return layers.mean(layers.fc(hidden, 1))


def on_devices(main_program: fluid.Program, startup: fluid.Program, loss: Any) -> None:
    with fluid.scope_guard(fluid.Scope()):
        exe = fluid.Executor()
        exe.run(startup)
        compiled = fluid.CompiledProgram(main_program).with_data_parallel(
            loss_name=loss.name, places=fluid.cpu_places(2)
        )
        exe.run(compiled, FEED, [loss])


def for_memory(main_program: fluid.Program, startup: fluid.Program, loss: Any) -> None:
    del startup
    fluid.memory_optimize(main_program, skip_opt_set={loss.name})
    fluid.release_memory(main_program)


def in_half_precision(main_program: fluid.Program, startup: fluid.Program, loss: Any) -> None:
    del loss
    use_mixed_precision(main_program, startup)


def for_servers(main_program: fluid.Program, startup: fluid.Program, loss: Any) -> None:
    del loss
    transpiler = fluid.DistributeTranspiler()
    transpiler.transpile(0, main_program, "s:1,s:2", 2, startup_program=startup)
    transpiler.get_pserver_program("s:2")


PLACED = ["00_input", "01_clip_on_trainers", "02_slice_var", "03_dispatch", "04_insert_send_recv"]
CASES: dict[Callable[..., None], dict[str, list[str]]] = {
    on_devices: {"main": ["00_input", "01_data_parallel", "02_donate"]},
    for_memory: {
        "main": ["00_input", "01_memory_optimize"],
        "main~1": ["00_input", "01_release_memory"],
    },
    in_half_precision: {"main": ["00_input", "01_amp_by_role"]},
    for_servers: {
        "main": [*PLACED, "05_prefetch_rows"],
        "startup": ["00_input", "01_insert_startup"],
        "main~1": PLACED,
    },
}


def labels(root: Path) -> dict[str, list[str]]:
    """Returns the entries of the index of each folder."""
    found = {path.parent.name: path.read_text() for path in root.glob("*/index.txt")}
    return {name: [line.split()[0] for line in text.splitlines()] for name, text in found.items()}


@pytest.mark.parametrize("rewrite", CASES, ids=lambda rewrite: rewrite.__name__)
def test_what_each_pass_did_to_a_fluid_program_is_dumped(
    rewrite: Callable[..., None], tmp_path: Path
) -> None:
    with fresh() as (main_program, startup):
        loss = net()
        fluid.optimizer.SGD(0.1).minimize(loss)
        with dumping_to(tmp_path):
            rewrite(main_program, startup, loss)
    assert labels(tmp_path) == CASES[rewrite]
    for path in tmp_path.glob("*/full/*.txt"):
        assert parse(path.read_text()).root.ops


def test_the_command_shows_the_passes_of_a_parallel_executors_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import numpy as np\n"
        "from jaxfleet import fluid\n"
        "main, startup = fluid.Program(), fluid.Program()\n"
        "with fluid.program_guard(main, startup), fluid.scope_guard(fluid.Scope()):\n"
        "    loss = fluid.layers.mean(fluid.layers.fc(fluid.data('x', [None, 4]), 1))\n"
        "    fluid.optimizer.SGD(0.1).minimize(loss)\n"
        "    fluid.Executor().run(startup)\n"
        "    parallel = fluid.ParallelExecutor(False, loss.name, main)\n"
        "    parallel.run([loss.name], feed={'x': np.ones((2, 4), np.float32)})\n"
    )
    monkeypatch.setenv("CPU_NUM", "2")
    assert main(["dump", "--dump-dir", str(tmp_path / "dumps"), str(script)]) == 0
    assert "01_data_parallel  changed" in capsys.readouterr().out


@pytest.mark.few(1)
@pytest.mark.parametrize("places", [1, 2])
def test_a_program_that_runs_is_timed_if_asked_for_and_trains_as_before(
    places: int, tmp_path: Path
) -> None:
    losses = []
    for measured in (2, 0):
        with fresh() as (main_program, startup), fluid.scope_guard(fluid.Scope()):
            main_program.random_seed = startup.random_seed = 1
            loss = net()
            fluid.optimizer.Momentum(0.1, 0.9).minimize(loss)
            program: Any = main_program
            if places > 1:
                program = fluid.CompiledProgram(main_program).with_data_parallel(
                    loss_name=loss.name, places=fluid.cpu_places(places)
                )
            with dumping_to(tmp_path / str(measured), measure=measured):
                exe = fluid.Executor()
                exe.run(startup)
                losses.append([np.sum(exe.run(program, FEED, [loss])[0]) for _ in range(2)])
    assert losses[0] == losses[1]
    (found,) = read_folders(tmp_path / "2")
    timed = found.measured
    assert timed is not None
    assert timed.calls == 2
    assert timed.step_s is not None, timed.why_not
    assert timed.step_s > 0
    assert timed.device.startswith(f"{places} x ")
    assert found.rows == len(FEED["x"]) // places
    (program,) = build_report([found]).programs
    assert program.work is not None
    forward, rows = 4 * 8 + 8 * 1, len(FEED["x"]) // places  # two products, each with two gradients
    assert program.work[0] == 2 * rows * (3 * forward - 4 * 8)  # but the data needs none
    (untimed,) = read_folders(tmp_path / "0")
    assert untimed.measured is None
