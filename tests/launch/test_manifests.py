"""The manifests of docs/launch/ are valid for clusters, and their commands start their jobs.

Kubernetes and SLURM are not available: the tests do the work of JobSet with its manifest, and of
`srun` on each machine, on addresses of this machine.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxfleet.cli import main
from jaxfleet.env import PserverRole, read_cluster
from tests.launch.jobs import WAIT_S, free_ports
from tests.launch.ranks import SAYS, places

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "launch"

# Fields of JobSet's CRD v1alpha2 and of its Jobs; these manifests use some.
OF_SPEC = {
    *("replicatedJobs", "network", "successPolicy", "failurePolicy", "suspend", "coordinator"),
    *("managedBy", "ttlSecondsAfterFinished", "volumeClaimPolicies", "startupPolicy"),
}
OF_JOB = {"completions", "parallelism", "completionMode", "backoffLimit", "template"}
OF_POD = {"restartPolicy", "containers", "volumes"}
OF_CONTAINER = {
    *("name", "image", "workingDir", "command", "args", "env", "resources", "volumeMounts"),
}
OF_SBATCH = {
    *("job-name", "nodes", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "time"),
    *("requeue", "no-requeue", "output", "open-mode"),
}

pytestmark = pytest.mark.processes


def read(name: str) -> dict[str, Any]:
    found = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def pods(manifest: Mapping[str, Any], job: str) -> tuple[int, dict[str, Any]]:
    """Returns the number of pods of a job of the set, and their container."""
    (found,) = [each for each in manifest["spec"]["replicatedJobs"] if each["name"] == job]
    spec = found["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    return spec["completions"], container


@pytest.mark.parametrize("name", ["collective.yaml", "pserver.yaml"])
def test_a_jobset_has_what_its_controller_reads(name: str) -> None:
    manifest = read(name)
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    spec = manifest["spec"]
    assert set(spec) <= OF_SPEC
    jobs = [job["name"] for job in spec["replicatedJobs"]]
    assert set(spec.get("successPolicy", {}).get("targetReplicatedJobs", [])) <= set(jobs)
    assert spec["network"] == {"enableDNSHostnames": True}
    assert set(spec["failurePolicy"]) == {"maxRestarts"}
    for job in spec["replicatedJobs"]:
        assert set(job) == {"name", "replicas", "template"}
        assert set(job["template"]) == {"spec"}
        of_job = job["template"]["spec"]
        assert set(of_job) == OF_JOB
        assert of_job["completionMode"] == "Indexed"  # pods have indices, and names by them
        assert of_job["completions"] == of_job["parallelism"]
        pod = of_job["template"]["spec"]
        assert set(pod) == OF_POD
        assert pod["restartPolicy"] in {"Never", "OnFailure"}
        for container in pod["containers"]:
            assert set(container) <= OF_CONTAINER
            mounted = {each["name"] for each in container["volumeMounts"]}
            assert mounted == {volume["name"] for volume in pod["volumes"]}
            names = [each["name"] for each in container.get("env", [])]
            assert len(names) == len(set(names))
            assert all(isinstance(each["value"], str) for each in container.get("env", []))
        secret = next(each for each in pod["volumes"] if each["name"] == "secret")
        assert secret["secret"]["defaultMode"] == 0o400  # not readable by others


def test_the_pods_of_a_collective_job_are_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = read("collective.yaml")
    count, container = pods(manifest, "ranks")
    text = container["args"][0]
    names = [f"digits-ranks-0-{at}.digits" for at in range(count)]
    assert f"--nodes {','.join(names)}" in text
    for at in range(count):
        environment = {"HOSTNAME": f"digits-ranks-0-{at}"}
        run(tmp_path, [*container["command"], text], environment)
    found = launched(tmp_path, monkeypatch, capsys, names, shared="/secret/secret")
    assert [place["PADDLE_TRAINER_ID"] for place in found] == [str(n) for n in range(8)]
    assert len({place["PADDLE_CURRENT_ENDPOINT"] for place in found}) == 8
    assert {place["PADDLE_TRAINERS_NUM"] for place in found} == {"8"}
    assert {place["JAXFLEET_SECRET_FILE"] for place in found} == {str(tmp_path / "secret")}


def test_the_pods_of_a_job_with_servers_find_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = read("pserver.yaml")
    for name in ("JAXFLEET_INSECURE", "JAXFLEET_SAVE_DIR"):
        monkeypatch.delenv(name)
    (tmp_path / "train.py").write_text(SAYS)
    servers = tuple(f"digits-servers-0-{at}.digits:6174" for at in range(2))
    job = PserverRole(
        role="trainer",
        trainers=2,
        endpoints=servers,
        job="digits",
        secret_file=Path("/secret/secret"),
        server_return_s=300.0,
    )
    kept = {"checkpoint_dir": Path("/checkpoints/servers"), "save_dirs": (Path("/checkpoints"),)}
    serves = {"role": "pserver", **kept}
    for name in ("servers", "trainers"):
        count, container = pods(manifest, name)
        assert count == 2
        for at in range(count):
            environment = {each["name"]: each["value"] for each in container["env"]}
            environment |= {"HOSTNAME": f"digits-{name}-0-{at}", "JOB_COMPLETION_INDEX": str(at)}
            text = container["args"][0].replace("jaxfleet serve", "python train.py")
            place = json.loads(run(tmp_path, [*container["command"], text], environment))
            with monkeypatch.context() as its:
                for variable, value in place.items():
                    its.setenv(variable, value)
                found = read_cluster()
            own: dict[str, Any] = {"trainer_id": at}
            if name == "servers":
                own = {**serves, "current_endpoint": servers[at]}
            assert found == replace(job, **own)


@pytest.mark.parametrize(
    ("name", "processes"), [("collective.sbatch", (8, 0)), ("pserver.sbatch", (4, 2))]
)
def test_a_script_for_slurm_starts_its_job(
    *,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    processes: tuple[int, int],
) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    directives = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text, re.MULTILINE)
    assert len(directives) == text.count("#SBATCH")
    assert {option for option, _ in directives} <= OF_SBATCH
    assert dict(directives)["nodes"] == "2"
    assert dict(directives)["ntasks-per-node"] == "1"
    first_command = re.search(r"^[^#\n]", text, re.MULTILINE)
    assert first_command is not None
    assert "#SBATCH" not in text[first_command.start() :]  # SLURM ignores them after a command
    write_script(tmp_path / "bin" / "scontrol", 'printf "n1\\nn2\\n"')
    write_script(tmp_path / "bin" / "srun", SRUN)
    run(tmp_path, ["bash", str(FOLDER / name)], {"SLURM_JOB_NODELIST": "n[1-2]", **OF_SLURM})
    secret = tmp_path / "digits-7000.secret"
    assert not secret.exists()
    found = launched(tmp_path, monkeypatch, capsys, ["n1", "n2"], shared=str(secret))
    roles = [place["TRAINING_ROLE"] for place in found]
    assert (roles.count("TRAINER"), roles.count("PSERVER")) == processes
    assert {place["JAXFLEET_JOB"] for place in found} == {"slurm-7000"}
    assert {place["PADDLE_TRAINERS_NUM"] for place in found} == {str(processes[0])}


OF_SLURM = {"SLURM_JOB_ID": "7000"}
# One task on each of two machines, one after the other.
SRUN = """
[ "$1" = --kill-on-bad-exit=1 ] && shift
SLURMD_NODENAME=n1 "$@" && SLURMD_NODENAME=n2 "$@"
"""
# Records its arguments, and whether only its user may read the secret.
CALLED = """
import json, os, pathlib, sys
words = sys.argv[1:]
secret = pathlib.Path(words[words.index("--secret-file") + 1])
mode = secret.stat().st_mode & 0o777 if secret.exists() else None
with open("calls", "a") as calls:
    print(json.dumps([words, mode]), file=calls)
"""


def launched(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    machines: list[str],
    *,
    shared: str,
) -> list[dict[str, str]]:
    """Launches as `jaxfleet launch` was called on each machine; returns the processes' output.

    Args:
        folder: the working folder of the calls.
        monkeypatch: of the test.
        capsys: likewise.
        machines: their names, replaced by addresses of this one.
        shared: the path of the secret file in the calls.
    """
    monkeypatch.chdir(folder)
    Path("train.py").write_text(SAYS)
    Path("secret").touch()
    port = free_ports(8)
    calls = [json.loads(line) for line in Path("calls").read_text().splitlines()]
    assert len(calls) == len(machines)
    for words, mode in calls:
        assert mode in {None, 0o600}
        line = "\0".join(words).replace(shared, "secret")
        for at, name in enumerate(machines):
            line = line.replace(name, f"127.0.0.{at + 1}")
        line = re.sub(r"--port\0\d+", f"--port\0{port}", line)
        if "--port" not in line:
            line = line.replace("--job", f"--port\0{port}\0--job")
        line = line.replace("--servers", "--servers-run-script\0--servers")
        assert main(line.split("\0")) == 0
    return places(capsys.readouterr().out)


def write_script(path: Path, text: str) -> None:
    """Writes an executable that the shell finds by its name."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def run(folder: Path, words: list[str], environment: Mapping[str, str]) -> str:
    """Runs a command that calls `jaxfleet` or `python`; returns its output."""
    (folder / "called.py").write_text(CALLED)
    write_script(folder / "bin" / "jaxfleet", f'exec {sys.executable} -I -S called.py "$@"')
    write_script(folder / "bin" / "python", f'exec {sys.executable} -I -S "$@"')
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, "PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_bash_reads_the_scripts() -> None:
    bash = shutil.which("bash")
    assert bash is not None
    for script in sorted(FOLDER.glob("*.sbatch")):
        done = subprocess.run([bash, "-n", str(script)], capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b""), script
