"""`jaxfleet launch --on slurm`: the script that it writes, and jobs of a real SLURM."""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxfleet.cli import main
from jaxfleet.errors import ConnectError
from jaxfleet.launch.engines import slurm
from tests.launch.slurm_cluster import SlurmCluster, slurm_cluster, why_not

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "launch"
WRITTEN = {
    "collective": "--nodes 2 --nproc 4 --max-restarts 3 --cpus-per-trainer 2 --save-every 5m "
    "--save-to checkpoints --job digits --sbatch time=01:00:00 train.py",
    "pserver": "--nodes 2 --servers 2 --trainers 4 --cpus-per-server 2 --cpus-per-trainer 4 "
    "--save-every 5m --save-to checkpoints --job digits --sbatch time=01:00:00 train.py "
    "--mode pserver",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JAXFLEET_INSECURE", raising=False)
    (tmp_path / "train.py").touch()
    return tmp_path


def written(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["launch", "--on", "slurm", "--dry-run", *words.split()]) == 0
    return capsys.readouterr().out


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_the_scripts_of_the_documentation_are_what_the_launch_writes(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert written(WRITTEN[name], capsys) == (DOCS / f"{name}.sbatch").read_text()


@pytest.mark.usefixtures("here")
def test_a_machine_has_processors_for_all_its_processes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = written(
        "--nodes 2 --servers 3 --trainers 3 --cpus-per-server 4 --cpus-per-trainer 2 "
        "--gpus-per-trainer 1 train.py",
        capsys,
    )
    assert "#SBATCH --cpus-per-task=12\n" in text  # two servers and two trainers on the first
    assert "#SBATCH --gpus-per-node=2\n" in text
    assert "#SBATCH --no-requeue\n" in text  # it has no checkpoint to go on from


def test_options_reach_the_launch_of_every_machine_as_they_were_given(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "secret").touch()
    given = "--timeout 9.5 --max-restarts 2 --save-every 300s --save-to a --nproc 1:4"
    text = written(f"{given} --secret-file secret -m pytest a --b=c", capsys)
    assert text.splitlines()[-1] == f"' launch {given} -m pytest a --b=c"
    assert f"SECRET={here / 'secret'}\n" in text
    assert "urandom" not in text
    text = written("--insecure train.py", capsys)
    assert "SECRET" not in text
    assert '--port "$PORT" --insecure "$@"' in text


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--on slurm --nodes a,b train.py", "--nodes is 'a,b'"),
        ("--on slurm --nodes 0 train.py", "a job on 0 machines"),
        ("--on slurm --port 7000 train.py", "--port does nothing here"),
        ("--on slurm --node a train.py", "--node does nothing here"),
        ("--on slurm --sbatch nodes=3 train.py", "--sbatch nodes=3 contradicts the job"),
        ("--on slurm --sbatch Time:3 train.py", "'Time:3' is not an option of sbatch"),
        ("--on slurm --job a/b train.py", "'a/b' is not a valid name for a batch job"),
        ("--on slurm --trainers 0 train.py", "trainers is 0"),
        ("--on slurm --nodes 2 --trainers 1:2 train.py", "how many trainers of other machines"),
        ("--on slurm --gpus-per-trainer -1 train.py", "gpus per trainer is -1"),
        ("--on pbs train.py", "there is no engine 'pbs'"),
        ("--dry-run train.py", "--dry-run does nothing here"),
        ("--cpus-per-trainer 2 train.py", "--cpus-per-trainer does nothing here"),
    ],
)
def test_what_cannot_run_is_refused_before_it_is_submitted(
    words: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *words.split()]) == 2
    assert error in capsys.readouterr().err


def test_bash_reads_the_script(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "two words.py").touch()
    assert main(["launch", "--on", "slurm", "--dry-run", "two words.py", "it's", "$HOME"]) == 2
    assert "'two words' is not a valid name for a batch job" in capsys.readouterr().err
    words = ["--job", "a", "two words.py", "it's", "$HOME"]
    assert main(["launch", "--on", "slurm", "--dry-run", *words]) == 0
    text = capsys.readouterr().out
    assert "SECRET=$PWD/a-$SLURM_JOB_ID.secret\n" in text
    bash = shutil.which("bash")
    assert bash is not None
    assert subprocess.run([bash, "-n"], input=text, text=True, check=False).returncode == 0
    echo = "set -- " + text.splitlines()[-1].removeprefix("' launch ") + '; printf "%s\\n" "$@"'
    shown = subprocess.run([bash, "-c", echo], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines() == ["two words.py", "it's", "$HOME"]


def test_without_slurm_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConnectError, match="there is no sbatch here") as caught:
        slurm.submit("")
    assert caught.value.hint is not None
    assert "--dry-run" in caught.value.hint


SCRIPT = """
import json, os, pathlib, sys, time
import jax, jax.numpy as jnp, numpy as np, optax
import jaxfleet as jf

mode, steps = sys.argv[1], int(sys.argv[2])
if mode == "collective":
    jf.initialize()
tx = jf.distributed_optimizer(optax.adam(0.1))

def loss_fn(w, x):
    return jnp.mean((x @ w - 1.0) ** 2)

def train_step(state, x):
    loss, grads = jax.value_and_grad(loss_fn)(state["w"], x)
    updates, opt = tx.update(grads, state["opt"], state["w"])
    return {"w": optax.apply_updates(state["w"], updates), "opt": opt}, loss

x = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
state = {"w": jnp.zeros(3), "opt": tx.init(jnp.zeros(3))}
with jf.distribute(train_step, (state, x), strategy=mode) as step:
    state, done = step.resume(state)
    for number in range(done, steps):
        state, loss = step(state, x)
        time.sleep(0.02)
        if jf.is_first() and number == done:
            pathlib.Path(f"began-{done}").touch()
    if jf.is_first():
        found = step.pull(state)["w"] if mode == "pserver" else state["w"]
        pathlib.Path("found").write_text(json.dumps([done, np.asarray(found).tolist()]))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    if reason := why_not():
        pytest.skip(reason)
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


def submitted(cluster: SlurmCluster, folder: Path, words: str) -> str:
    """Submits the script as a user does; returns the number of its job."""
    (folder / "train.py").write_text(SCRIPT)
    bin_of_python = str(Path(sys.executable).parent)
    done = subprocess.run(
        [sys.executable, "-m", "jaxfleet", "launch", "--on", "slurm", "--nodes", "2",
         *words.split()],
        cwd=folder,
        env={**cluster.environment, "PATH": f"{bin_of_python}:{cluster.environment['PATH']}",
             "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    number = re.search(r"job (\d+)", done.stdout)
    assert number is not None
    return number[1]


def found_in(folder: Path) -> tuple[int, list[float]]:
    done, values = json.loads((folder / "found").read_text())
    return done, values


@pytest.mark.grid
@pytest.mark.processes
@pytest.mark.parametrize("words", ["--nproc 2 train.py collective 20",
                                   "--servers 2 --trainers 4 train.py pserver 20"])  # fmt: skip
def test_slurm_runs_a_job_on_two_machines(
    words: str, tmp_path: Path, cluster: SlurmCluster
) -> None:
    job = submitted(cluster, tmp_path, words)
    state = cluster.awaited(job, "COMPLETED", "FAILED", within_s=120.0)
    log = (tmp_path / f"train-{job}.log").read_text()
    assert state == "COMPLETED", log
    assert len(re.findall("(?:rank|trainer) \\d: process", log)) == 4, log
    assert found_in(tmp_path)[0] == 0
    assert not list(tmp_path.glob("*.secret"))


@pytest.mark.grid
@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "words",
    [
        "--nproc 1 --save-every 10steps --save-to saved train.py collective",
        "--servers 2 --trainers 2 --save-every 10steps --save-to saved train.py pserver",
    ],
)
def test_a_job_that_loses_a_machine_is_queued_again_and_goes_on(
    words: str, tmp_path: Path, cluster: SlurmCluster
) -> None:
    (whole := tmp_path / "whole").mkdir()
    job = submitted(cluster, whole, f"{words} 200")
    cluster.awaited(job, "COMPLETED", within_s=120.0)
    (cut := tmp_path / "cut").mkdir()
    job = submitted(cluster, cut, f"{words} 200")
    cluster.awaited(job, "RUNNING", within_s=30.0)
    began = cut / "began-0"
    for _ in range(600):
        if began.exists() and any(cut.glob("saved/**/step-*")):
            break
        time.sleep(0.1)
    assert began.exists()
    cluster.lose(cluster.machines[1])
    cluster.awaited(job, "PENDING", within_s=60.0)
    cluster.start(cluster.machines[1])
    cluster.awaited(job, "COMPLETED", within_s=300.0)
    done, values = found_in(cut)
    assert done > 0, (cut / f"train-{job}.log").read_text()
    assert values == found_in(whole)[1]
