"""`jaxfleet view`."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxfleet.cli import main
from tests.cli.test_dump import SCRIPT
from tests.report.drawn import deep_step, write_dump

CAPTURED = """
import jax.numpy as jnp
import jaxfleet as jf

def step(state, batch):
    halved = state["w"] * 0.5
    return {"w": halved + batch["x"].sum()}, batch["x"].mean()

state, batch = {"w": jnp.ones(())}, {"x": jnp.ones((4, 2))}
jf.distribute(step, (state, batch), "single")(state, batch)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "helper.py").write_text("NAME = 'step'\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.delitem(sys.modules, "helper", raising=False)
    monkeypatch.chdir(tmp_path)
    return "train.py"


def test_a_script_is_run_and_reported(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["view", script, "--epochs", "3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("arguments ['--epochs', '3']\n")
    assert "train.html: 1 program, 1 operators, " in out
    page = (tmp_path / "train.html").read_text()
    assert '"name":"dce"' in page


def test_the_report_of_a_script_that_is_named_by_a_relative_path_has_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(CAPTURED)
    monkeypatch.chdir(tmp_path)
    assert main(["view", "train.py"]) == 0
    assert 'halved = state[\\"w\\"] * 0.5' in (tmp_path / "train.html").read_text()


def _program(page: str) -> Any:
    (data,) = re.findall(r'id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(data)["programs"][0]


def test_a_script_is_measured_if_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(CAPTURED)
    monkeypatch.chdir(tmp_path)
    assert main(["view", "--measure", "3", "train.py"]) == 0
    program = _program((tmp_path / "train.html").read_text())
    assert program["measured"]["calls"] == 3
    assert program["measured"]["step_s"] > 0
    assert program["memory"] == [] or program["memory"][-1]["xla"] >= 0
    assert main(["view", "train.py"]) == 0
    program = _program((tmp_path / "train.html").read_text())
    assert program["measured"] is None
    assert "--measure 10" in program["unmeasured"]


def test_only_a_script_has_steps_to_measure(tmp_path: Path) -> None:
    write_dump(tmp_path)
    assert main(["view", "--measure", "3", str(tmp_path)]) != 0
    with pytest.raises(SystemExit):
        main(["view", "--measure", "many", str(tmp_path)])


TEXT = """program p
  param w: f32[]
  block 0
    optimize
      w = jax.neg(w)  # {file}:2, in step
"""


def test_a_text_has_the_lines_of_files_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "model.py").write_text("# one\nw = -w  # the user's\n")
    (tmp_path / "secret.py").write_text("\nPASSWORD = 'x'\n")
    (tmp_path / "app" / "key.pem").write_text("\nPASSWORD = 'x'\n")
    for folder, file, found in (
        (tmp_path, "app/model.py", True),
        (tmp_path / "app", "app/model.py", True),
        (tmp_path / "app", "../secret.py", False),
        (tmp_path, "app/key.pem", False),
        (tmp_path, "app/missing.py", False),
    ):
        (folder / "step.txt").write_text(TEXT.replace("{file}", file))
        monkeypatch.chdir(folder)
        assert main(["view", "step.txt"]) == 0
        page = (folder / "step.html").read_text()
        assert ("w = -w  # the user's" in page) == found, (folder, file)
        assert ("in the current folder, as they are now" in page) == found
        assert "PASSWORD" not in page


def test_a_report_can_go_to_standard_output(tmp_path: Path) -> None:
    (tmp_path / "step.txt").write_text(str(deep_step(1)))
    command = [sys.executable, "-m", "jaxfleet", "view", "-o", "/dev/stdout", "step.txt"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("<!doctype html>")
    assert run.stdout.rstrip().endswith("</html>")
    assert "/dev/stdout: 1 program, " in run.stderr


def test_a_dump_folder_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dump(tmp_path / "dumps")
    assert main(["view", "-o", str(tmp_path / "r.html"), str(tmp_path / "dumps")]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'r.html'}: 1 program, ")
    assert '"name":"grad_allreduce"' in (tmp_path / "r.html").read_text()


def test_every_program_of_a_text_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"{deep_step(1, name='one')}\n\n{deep_step(2, name='two')}\n"
    (tmp_path / "both.txt").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main(["view", "both.txt"]) == 0
    assert capsys.readouterr().out.startswith("both.html: 2 programs, ")


def test_a_failing_script_is_reported_as_far_as_it_came(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / script).open("a") as file:
        file.write("raise ValueError('wrong')\n")
    assert main(["view", script]) == 1
    assert "ValueError: wrong" in capsys.readouterr().err
    assert (tmp_path / "train.html").is_file()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nothing.txt"], "there is no nothing.txt"),
        (["nothing.py"], "there is no script nothing.py"),
        (["."], "contains no dump"),
        (["p.txt", "--epochs"], "p.txt is not a script and takes no arguments: --epochs"),
    ],
)
def test_a_wrong_target_is_refused(
    words: list[str],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["view", *words]) == 2
    assert says in capsys.readouterr().err


def test_a_script_without_a_pipeline_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.py").write_text("")
    assert main(["view", "empty.py"]) == 0
    assert "no pipeline ran in empty.py" in capsys.readouterr().err
    assert not (tmp_path / "empty.html").exists()


def test_a_dump_and_a_text_are_reported_without_jax(tmp_path: Path) -> None:
    write_dump(tmp_path / "dumps")
    (tmp_path / "p.txt").write_text(str(deep_step(2)))
    code = (
        "import sys; from jaxfleet.cli import main; "
        "assert main(['view', 'dumps']) == main(['view', 'p.txt']) == 0; "
        "assert 'jax' not in sys.modules"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    ("where", "said"), [("no/x.html", "there is no folder"), (".", "a folder")]
)
def test_a_file_that_cannot_be_written_is_refused_before_the_script_runs(
    where: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('it ran')")
    monkeypatch.chdir(tmp_path)
    assert main(["view", "-o", where, "train.py"]) != 0
    err = capsys.readouterr().err
    assert said in err
    assert "it ran" not in err


def test_a_script_that_fails_behind_its_step_is_reported_and_said_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = CAPTURED.replace('"single")(state, batch)', '"single")\nraise ValueError("later")')
    (tmp_path / "train.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main(["view", "train.py"]) != 0
    assert _program((tmp_path / "train.html").read_text())["name"] == "step"
    assert "the report has what ran before" in capsys.readouterr().err
