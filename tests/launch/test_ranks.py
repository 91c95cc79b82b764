"""Collective jobs: each rank's place and log, and restarts of all after a failure."""

import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from jaxfleet.cli import launch as cli
from jaxfleet.cli import main
from jaxfleet.env import read_restart
from jaxfleet.errors import AssertedError, StrategyError
from jaxfleet.launch import CollectiveJob, Nodes, launch_ranks, placement, rendezvous_ends
from jaxfleet.launch.placement import seen_gpus, selected_gpus
from jaxfleet.launch.rendezvous import Rendezvous
from jaxfleet.launch.starter import write_secret
from tests.launch.jobs import WAIT_S, free_ports, noted, noting, runs, wait_until
from tests.launch.ranks import SAYS, command, failing, places, ranks

pytestmark = pytest.mark.processes


def test_each_rank_reads_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("PADDLE_PORT", "POD_IP", "PADDLE_PSERVERS_IP_PORT_LIST", "JAXFLEET_RESTART"):
        monkeypatch.setenv(name, "8")  # of the job in which this one is started
    monkeypatch.setenv("JAXFLEET_MEETING_DIR", "/of/another/job")
    monkeypatch.setenv("FLAGS_selected_gpus", "0,1")
    monkeypatch.setenv("XLA_FLAGS", "--one=1 --xla_force_host_platform_device_count=9")
    monkeypatch.setenv("no_proxy", "home")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("http_proxy", "http://proxy:1")
    job = ranks(SAYS, nproc=2, name="a job", log_dir=tmp_path / "logs", cpu_devices=3)
    assert launch_ranks(job) == 0
    out, err = capsys.readouterr()
    found = places(out)
    endpoints = found[0]["PADDLE_TRAINER_ENDPOINTS"].split(",")
    assert len(set(endpoints)) == 2
    assert f"2 ranks, the first at {endpoints[0]}" in err
    meeting = {place.pop("JAXFLEET_MEETING_DIR") for place in found}
    assert [Path(each).name for each in meeting] == ["start-0"]  # all see the same folder
    secrets = {place.pop("JAXFLEET_SECRET_FILE") for place in found}
    assert [Path(each).name for each in secrets] == ["secret"]
    for rank, place in enumerate(found):
        assert place == {
            "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
            "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_TRAINERS_NUM": "2",
            "TRAINING_ROLE": "TRAINER",
            "PADDLE_TRAINING_ROLE": "TRAINER",
            "JAXFLEET_JOB": "a job",
            "JAXFLEET_RESTART": "0",
            "XLA_FLAGS": "--one=1 --xla_force_host_platform_device_count=3",
            "JAX_PLATFORMS": "cpu",
            "http_proxy": "http://proxy:1",
            "no_grpc_proxy": "home,127.0.0.1",
        }
        log = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
        assert f"rank {rank} | {log}" in out


def test_all_ranks_are_started_again_where_one_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = noting(tmp_path) + SAYS + failing(tmp_path, 2)
    job = ranks(code, nproc=2, max_restarts=2, log_dir=tmp_path / "logs")
    assert launch_ranks(job) == 0
    out, err = capsys.readouterr()
    found = places(out)
    assert [place["JAXFLEET_RESTART"] for place in found] == ["0", "1", "2"] * 2
    assert len({place["PADDLE_TRAINER_ENDPOINTS"] for place in found}) == 3
    assert len(noted(tmp_path)) == 6
    said = [line for line in err.splitlines() if line.startswith("launch")]
    for start in (0, 1):
        assert any(f"rank 1 ended with exit code {7 + start} after" in line for line in said)
        again = f"all ranks are started again ({start + 1} of 2), each from what it has saved"
        assert any(line.endswith(again) for line in said)
    assert sum("rank 0 stopped with SIGTERM" in line for line in said) == 2
    assert "breaks in start 0\nbreaks in start 1" in _lines(tmp_path / "logs" / "rank-1.log")


def _lines(log: Path) -> str:
    """Returns the lines of a log that do not report places."""
    return "\n".join(line for line in log.read_text().splitlines() if "{" not in line)


@pytest.mark.grid
def test_a_job_that_fails_too_often_ends_as_its_last_start_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ranks(failing(tmp_path, 9), nproc=2, max_restarts=1, quiet=True)
    assert launch_ranks(job) == 8
    err = capsys.readouterr().err
    assert err.count("started again (1 of 1)") == 1
    assert "rank 1 ended with exit code 8" in err.splitlines()[-1]
    assert "process" not in err  # a quiet launch prints only failures


def test_a_rank_that_fails_for_want_of_another_may_say_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = """
import os, sys, time
rank = int(os.environ["PADDLE_TRAINER_ID"])
time.sleep(0.5 * rank)
sys.exit("no rows" if rank == 0 else "rank 0 is gone")
"""
    assert launch_ranks(ranks(code, nproc=2)) == 1
    err = capsys.readouterr().err
    assert "rank 1 | rank 0 is gone" in err, err
    assert "rank 1 ended with exit code 1" in err, err
    assert "rank 0 ended with exit code 1" in err.splitlines()[-1]


@pytest.mark.grid
def test_a_job_that_is_told_to_stop_while_it_stops_is_not_started_again(tmp_path: Path) -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    code = deaf + noting(tmp_path) + failing(tmp_path, 9)
    options = ["--nproc", "2", "--max-restarts", "5", "--grace", "60"]
    with command(tmp_path, code, *options) as launcher:
        assert launcher.stderr is not None
        before = ""
        while "stopping all" not in before:
            before = launcher.stderr.readline()
        launcher.send_signal(signal.SIGINT)
        _, err = launcher.communicate(timeout=WAIT_S)
    assert launcher.returncode == 130, err
    assert "started again" not in err
    assert not any(runs(pid) for pid in noted(tmp_path))


@pytest.mark.grid  # two restarts; the next test has one, and `test_slots.py` the decisions
def test_a_start_is_without_ranks_that_were_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"nproc": 3, "min_nproc": 2, "max_restarts": 2, "gpus": range(6)}
    logs = tmp_path / "logs"
    assert launch_ranks(ranks(SAYS + failing(tmp_path, 2), log_dir=logs, **options)) == 0
    out, err = capsys.readouterr()
    found = [(place["JAXFLEET_RESTART"], place) for place in places(out)]
    gpus = [
        [place["FLAGS_selected_gpus"] for start, place in found if start == number]
        for number in "012"
    ]
    # Slot 1 is lost first, then slot 2, which is rank 1 by then; two ranks are the least number.
    assert gpus == [["0,1", "2,3", "4,5"], ["0,1", "4,5"], ["0,1", "2,3"]]
    assert [place["PADDLE_TRAINERS_NUM"] for _, place in found] == ["3", "2", "2"] * 2 + ["3"]
    again = "each from what it has saved; 2 of 3 ranks are left; rank 1 failed"
    for count in ("1 of 2", "2 of 2"):
        assert f"all ranks are started again ({count}), {again}" in err
    assert sorted(path.name for path in logs.iterdir()) == [f"rank-{n}.log" for n in range(3)]


WANTING = """
import os, signal, sys, time
if os.environ["JAXFLEET_RESTART"] == "0":
    if os.environ["PADDLE_TRAINER_ID"] == "0":
        sys.exit("jaxfleet.errors.PeerLostError: step 6: rank 2 is lost")
    time.sleep(200)
"""


@pytest.mark.grid
def test_a_rank_that_reports_a_lost_peer_is_not_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert launch_ranks(ranks(SAYS + WANTING, nproc=2, min_nproc=1, max_restarts=1)) == 0
    out, err = capsys.readouterr()
    assert [place["PADDLE_TRAINERS_NUM"] for place in places(out)] == ["2"] * 4
    assert "each from what it has saved; 2 of 2 ranks are left\n" in err


# The first machine's rank fails until the other's, whose launch is killed in start 0, is back.
ALONE = """
import os, pathlib, sys, time
here, start = pathlib.Path({folder!r}), os.environ["JAXFLEET_RESTART"]
(here / f"start{{start}}.{{os.environ['PADDLE_TRAINER_ID']}}").touch()
while start == "0" and not (here / "gone").exists():
    time.sleep(0.05)
if os.environ["PADDLE_TRAINERS_NUM"] == "1" or start == "0":
    time.sleep(0.2)
    sys.exit("jaxfleet.errors.PeerLostError: rank 1 is lost")
"""


@pytest.mark.grid  # `test_rendezvous.py` has the decisions without processes
def test_a_start_is_without_a_machine_that_is_missing_until_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decides = Rendezvous("127.0.0.1+127.0.0.2", ("127.0.0.1", "127.0.0.2"), least=1)
    monkeypatch.setattr(rendezvous_ends, "Rendezvous", lambda *_: decides)
    monkeypatch.setenv("JAXFLEET_MEETING_DIR", str(tmp_path))
    code, port, most = SAYS + ALONE.format(folder=str(tmp_path)), free_ports(200), 500
    write_secret(tmp_path / "secret")
    options = ["--nproc", "1", "--nodes", "127.0.0.1,127.0.0.2", "--min-nodes", "1"]
    options += ["--secret-file", str(tmp_path / "secret"), "--max-restarts", str(most)]
    options += ["--port", str(port), "--timeout", str(WAIT_S), "--node", "127.0.0.2"]
    job = ranks(
        code,
        name="127.0.0.1+127.0.0.2",
        nodes=Nodes(("127.0.0.1", "127.0.0.2"), "127.0.0.1"),
        min_nodes=1,
        port=port,
        secret_file=tmp_path / "secret",
        max_restarts=most,
    )
    with ThreadPoolExecutor(1) as here:
        status = here.submit(launch_ranks, job)
        with command(tmp_path, code, *options) as other:
            wait_until(lambda: (tmp_path / "start0.1").exists() or status.done(), "its rank")
            other.kill()
        decides.last_call_s = 0.5
        (tmp_path / "gone").touch()
        wait_until((tmp_path / "start1.0").exists, "a start without the other machine")
        with command(tmp_path, code, *options) as other:
            also, error = other.communicate(timeout=2 * WAIT_S)
        assert (status.result(), other.returncode) == (0, 0), error
    out, err = capsys.readouterr()
    first, *alone, last = places(out)
    assert first["PADDLE_TRAINERS_NUM"] == last["PADDLE_TRAINERS_NUM"] == "2"
    assert {place["PADDLE_TRAINERS_NUM"] for place in alone} == {"1"}
    assert f"started again (1 of {most}), each from what it has saved; 1 of 2 ranks are left" in err
    (back,) = places(also)
    for name in ("PADDLE_TRAINER_ENDPOINTS", "JAXFLEET_RESTART", "JAXFLEET_MEETING_DIR"):
        assert back[name] == last[name]
    assert [place["PADDLE_TRAINER_ID"] for place in (last, back)] == ["0", "1"]


def test_a_launch_of_another_job_is_refused(tmp_path: Path) -> None:
    write_secret(tmp_path / "secret")
    names, port = ("127.0.0.1", "127.0.0.2"), free_ports(4)
    jobs = [
        ranks(
            "pass",
            name=name,
            nodes=Nodes(names, own),
            min_nodes=1,
            port=port,
            secret_file=tmp_path / "secret",
            max_restarts=1,
        )
        for name, own in zip(("one", "other"), names, strict=True)
    ]
    host, guest = (rendezvous_ends.machine_rendezvous(job, f"127.0.0.1:{port}") for job in jobs)
    with closing(host), closing(guest), pytest.raises(StrategyError, match="refused: here meet"):
        guest.meet(1, -1, lambda _: False)


@pytest.mark.grid
def test_two_machines_agree_on_ranks_and_ports_of_every_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXFLEET_MEETING_DIR", "/all/see/it")
    port = free_ports(4)
    # A rank of one machine fails, and one of the other for lack of it.
    code = SAYS + failing(tmp_path, 1, ranks="13")
    nodes = ["--nproc", "2", "--nodes", "127.0.0.1,127.0.0.2", "--port", str(port)]
    nodes += ["--insecure", "--max-restarts", "1", "--timeout", str(WAIT_S), "--node"]
    with (
        command(tmp_path, code, *nodes, "127.0.0.2") as second,
        command(tmp_path, code, *nodes, "127.0.0.1") as launcher,
    ):
        out, err = launcher.communicate(timeout=2 * WAIT_S)
        also, error = second.communicate(timeout=2 * WAIT_S)
    assert (launcher.returncode, second.returncode) == (0, 0), err + error
    found = places(out + also)
    for start in range(2):
        now = [place for place in found if place["JAXFLEET_RESTART"] == str(start)]
        endpoints = [f"127.0.0.{n}:{port + 2 * start + at}" for n in (1, 2) for at in (0, 1)]
        assert [place["PADDLE_CURRENT_ENDPOINT"] for place in now] == endpoints
        assert {place["PADDLE_TRAINER_ENDPOINTS"] for place in now} == {",".join(endpoints)}
        assert [place["PADDLE_TRAINER_ID"] for place in now] == list("0123")
        assert {place["JAXFLEET_MEETING_DIR"] for place in now} == {f"/all/see/it/start-{start}"}
    assert {place["JAXFLEET_JOB"] for place in found} == {"127.0.0.1+127.0.0.2"}


def test_gpus_are_shared_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy:1")
    assert launch_ranks(ranks(SAYS, nproc=2, gpus=(0, 1, 2, 3), proxies=False)) == 0
    found = places(capsys.readouterr().out)
    assert not {"https_proxy", "no_grpc_proxy"} & {name for place in found for name in place}
    assert [place["FLAGS_selected_gpus"] for place in found] == ["0,1", "2,3"]
    monkeypatch.setattr(placement, "_DEVICES", tmp_path)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert seen_gpus() == (0, 1)
    assert selected_gpus("1, 5") == (1, 5)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    assert seen_gpus() == (0, 1, 2)
    assert selected_gpus("7,4") == (2, 0)
    with pytest.raises(AssertedError, match="GPU 6 is not among the visible ones"):
        selected_gpus("6")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert seen_gpus() == ()


def test_every_option_reaches_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[CollectiveJob] = []
    monkeypatch.setattr(cli, "launch_ranks", lambda asked: launched.append(asked) or 0)  # type: ignore[func-returns-value]
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    options = "--nproc 2 --nodes a,b --node b --port 7000 --max-restarts 3 --gpus 0,1 --grace 2"
    options += " --insecure"
    assert main(["launch", *options.split(), "--devices-per-process", "4", "train.py", "-x"]) == 0
    assert main(["launch", "--nproc", "2", "--job", "j", "--node", "c", "train.py"]) == 0
    several, one = launched
    assert several == CollectiveJob(
        command=(sys.executable, "train.py", "-x"),
        name="a+b",
        nodes=Nodes(("a", "b"), "b"),
        nproc=2,
        port=7000,
        gpus=(0, 1),
        cpu_devices=4,
        max_restarts=3,
        grace_s=2.0,
        insecure=True,
    )
    assert (one.name, one.nodes) == ("j", Nodes(("c",), "c"))


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--nproc", "0"], "nproc is 0"),
        (["--nproc", "1", "--max-restarts", "-1"], "max_restarts is -1"),
        (["--nproc", "3:2", "--max-restarts", "1"], "min_nproc is 3"),
        (["--nproc", "1:2"], "a job that never starts again has the ranks of its first start"),
        (["--nproc", "1", "--min-nodes", "2", "--max-restarts", "1"], "min_nodes is 2"),
        (["--min-nodes", "1"], "--min-nodes does nothing here"),
        (["--nproc", "1", "--devices-per-process", "0"], "devices per process is 0"),
        (["--nproc", "2", "--gpus", "0,1,2"], "3 GPUs cannot be shared out to 2 processes"),
        (["--nproc", "2", "--port", "65535"], "port is 65535"),
        (["--nproc", "2", "--servers", "1"], "--servers does nothing here"),
        (["--gpus", "0"], "--gpus does nothing here"),
        (["--nproc", "1", "--nodes", "a,b"], "which of several machines is this one?"),
        (["--nproc", "1", "--nodes", "a,b", "--node", "c"], "this machine, c, is none of the job"),
        (["--nproc", "1", "--nodes", "a,a", "--node", "a"], "the machine a is named twice"),
        (["--nproc", "1", "--nodes", "a,,b", "--node", "a"], "'' is not a machine's name"),
        (["--nodes", "a,b", "--node", "a"], "a job on several machines has no name"),
        (["--nproc", "1", "--nodes", "a,b", "--node", "a"], "several machines has no secret"),
        (["--job", "j", "--nodes", "a,b", "--node", "a"], "several machines has no secret"),
    ],
)
def test_what_cannot_be_launched_is_refused(
    *,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    what: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.py").touch()
    assert main(["launch", *words, "here.py"]) == 2
    assert what in capsys.readouterr().err


def test_an_interval_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["launch", "--save-every", "5x", "here.py"])
    assert "'5x' is not an interval of checkpoints; write 300s" in capsys.readouterr().err


def test_a_job_needs_a_command() -> None:
    with pytest.raises(StrategyError, match="needs a command"):
        CollectiveJob(command=())


def test_a_script_can_ask_how_often_it_was_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAXFLEET_RESTART", raising=False)
    assert read_restart() == 0
    monkeypatch.setenv("JAXFLEET_RESTART", "2")
    assert read_restart() == 2
    monkeypatch.setenv("JAXFLEET_RESTART", "two")
    with pytest.raises(StrategyError, match="JAXFLEET_RESTART is 'two'"):
        read_restart()
