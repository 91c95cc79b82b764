"""`jaxfleet dump`."""

import sys
from pathlib import Path

import pytest

from jaxfleet.cli import main
from jaxfleet.env import read_environment

# A script's pipelines take their dump folder from the environment, as a step's do.
SCRIPT = """
import sys
import jaxfleet.passes
from helper import NAME
from jaxfleet.env import read_environment
from jaxfleet.ir import parse
from jaxfleet.pipeline import Dump, new_dump_folder, parse_pipeline, run_pipeline

print("arguments", sys.argv[1:])
settings = read_environment()
program = parse(f'''
program {NAME}
  data  x: f32[4]
  param w: f32[4]
  block 0
    forward
      dead: f32[4] = jax.neg(x)  # model/train.py:7, in step
      w = jax.add(w, x)
''')
for _ in range(2):
    folder = new_dump_folder(settings.dump_dir, program.name)
    dump = Dump(folder, source=settings.dump_source)
    run_pipeline(program, parse_pipeline("donate,dce"), instruments=[dump])
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "helper.py").write_text("NAME = 'step'\n")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    monkeypatch.delitem(sys.modules, "helper", raising=False)
    return str(path)


def test_a_script_runs_as_main_and_its_pipelines_are_dumped(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "dump"
    assert main(["dump", "--dump-dir", str(folder), script, "--epochs", "3"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[0] == "arguments ['--epochs', '3']"
    assert lines[1] == f"{folder / 'step'}:"
    assert [line.split()[0] for line in lines[2:5]] == ["00_input", "01_donate", "02_dce"]
    assert f"{folder / 'step~1'}:" in lines
    assert (folder / "step" / "02_dce.diff").is_file()


def test_its_own_options_may_come_last(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "dump"
    assert main(["dump", script, "--epochs", "3", "--dump-dir", str(folder), "--source"]) == 0
    assert capsys.readouterr().out.startswith("arguments ['--epochs', '3']\n")
    assert "model/train.py:7" in (folder / "step" / "02_dce.diff").read_text()


def test_arguments_after_a_double_dash_are_the_scripts(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "dump"
    assert main(["dump", "--dump-dir", str(folder), script, "a", "--", "--source", "b"]) == 0
    assert capsys.readouterr().out.startswith("arguments ['a', '--source', 'b']\n")
    assert "model/train.py:7" not in (folder / "step" / "02_dce.diff").read_text()


def test_a_second_run_replaces_the_dumps_of_the_first(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "dump"
    for _ in range(2):
        assert main(["dump", "--dump-dir", str(folder), script]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["step", "step~1"]
    capsys.readouterr()


def test_nothing_of_the_process_is_left_changed(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (list(sys.argv), list(sys.path), read_environment())
    assert main(["dump", "--dump-dir", str(tmp_path / "dump"), script]) == 0
    assert (list(sys.argv), list(sys.path), read_environment()) == before
    capsys.readouterr()


def test_a_script_without_a_pipeline_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.py").write_text("")
    assert main(["dump", "--dump-dir", str(tmp_path / "d"), str(tmp_path / "empty.py")]) == 0
    assert "no pipeline ran in the script" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("sys.exit(0)", 0),
        ("sys.exit()", 0),
        ("sys.exit(3)", 3),
        ("sys.exit('so it ends')", 1),
        ("raise ValueError('wrong')", 1),
        ("raise jaxfleet.errors.PassError('wrong', hint='do it right')", 1),
    ],
)
def test_the_dumps_are_shown_however_the_script_ends(
    ending: str, status: int, script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(script).write_text(f"{SCRIPT}\n{ending}\n")
    assert main(["dump", "--dump-dir", str(tmp_path / "dump"), script]) == status
    assert "02_dce" in capsys.readouterr().out


def test_an_error_of_the_script_is_shown_from_the_script_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wrong.py"
    path.write_text("def fail():\n    raise ValueError('wrong')\n\nfail()\n")
    assert main(["dump", "--dump-dir", str(tmp_path / "d"), str(path)]) == 1
    err = capsys.readouterr().err
    assert "ValueError: wrong" in err
    assert f'File "{path}", line 2, in fail' in err
    assert "runpy" not in err


def test_our_own_errors_are_shown_with_their_notes_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(
        "from jaxfleet.errors import PassError\nraise PassError('wrong', hint='do it right')\n"
    )
    assert main(["dump", "--dump-dir", str(tmp_path / "d"), str(path)]) == 1
    err = capsys.readouterr().err
    assert "wrong" in err
    assert "  hint: do it right" in err
    assert "Traceback" not in err


def test_a_missing_script_is_a_user_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dump", str(tmp_path / "nowhere.py")]) == 2
    assert "there is no script" in capsys.readouterr().err


STEPS = """
import jax, jax.numpy as jnp, optax
import jaxfleet as jf

tx = jf.distributed_optimizer(optax.sgd(0.1))

def train_step(state, batch):
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(state["w"])
    updates, opt = tx.update(grads, state["opt"], state["w"])
    return {"w": optax.apply_updates(state["w"], updates), "opt": opt}, loss

w = jnp.ones(3)
state = {"w": w, "opt": tx.init(w)}
step = jf.distribute(train_step, (state, jnp.ones((4, 3))), jf.DistributedStrategy(devices=2))
print("distributed")
state, loss = step(state, jnp.ones((4, 3)))
print("trained")
"""
FLUID = """
import numpy as np
import jaxfleet.fluid as fluid

x = fluid.layers.data("x", [3])
loss = fluid.layers.mean(fluid.layers.fc(x, 1))
fluid.optimizer.SGD(0.1).minimize(loss)
exe = fluid.Executor(fluid.CPUPlace())
exe.run(fluid.default_startup_program())
print("started")
for _ in range(3):
    exe.run(feed={"x": np.ones((4, 3), "float32")}, fetch_list=[loss])
    print("trained")
"""


@pytest.mark.parametrize(
    ("text", "written"), [(STEPS, "distributed"), (FLUID, "started")], ids=["jax", "fluid"]
)
def test_a_script_ends_at_its_first_step_where_only_passes_are_of_interest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, written: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    words = ["dump", "--until-compiled", "--dump-dir", str(tmp_path / "dump"), str(script)]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert written in out
    assert "trained" not in out
