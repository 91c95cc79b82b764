"""`python -m jaxfleet.launch` and `launch_ps` match paddle's, argument by argument."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import jaxfleet.compat
from jaxfleet.errors import AssertedError, StrategyError
from jaxfleet.launch import paddle_launch, paddle_launch_ps
from tests.launch.jobs import IDLE, WAIT_S, free_ports, noted, noting
from tests.launch.ranks import SAYS, failing, places

pytestmark = pytest.mark.processes

ENDS = "import time; time.sleep(0.5)"
CLOUD = {
    "PADDLE_TRAINERS": "127.0.0.1,127.0.0.2",
    "POD_IP": "127.0.0.1",
    "PADDLE_TRAINER_ID": "0",
    "PADDLE_TRAINERS_NUM": "2",
}
FROM_CLOUD = ["--use_paddlecloud", "--selected_gpus", "0,1"]


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Gives a launch no GPU, no cloud, and its own folder."""
    for name in (*CLOUD, "PADDLE_PORT", "TRAINER_PORTS_NUM", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.chdir(tmp_path)


def script(code: str) -> str:
    """Writes a script to the working folder, and returns its name."""
    Path("script.py").write_text(code)
    return "script.py"


def run(name: str, *words: str) -> "subprocess.CompletedProcess[str]":
    """Runs one of the two commands in another process."""
    return subprocess.run(
        [sys.executable, "-m", f"jaxfleet.{name}", *words],
        capture_output=True,
        text=True,
        timeout=2 * WAIT_S,
        check=False,
    )


def test_two_machines_of_the_cloud_agree_on_four_endpoints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_ports(2)
    for name, value in {**CLOUD, "PADDLE_PORT": str(port), "TRAINER_PORTS_NUM": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("http_proxy", "http://proxy:1")
    assert paddle_launch.main([*FROM_CLOUD, "--log_dir", "logs", script(SAYS)]) == 0
    endpoints = [f"127.0.0.{node}:{port + at}" for node in (1, 2) for at in (0, 1)]
    found = places(capsys.readouterr().out)
    assert len(found) == 2
    for rank, place in enumerate(found):
        assert place["PADDLE_TRAINER_ENDPOINTS"] == ",".join(endpoints)
        assert place["PADDLE_CURRENT_ENDPOINT"] == endpoints[rank]
        assert place["PADDLE_TRAINERS_NUM"] == "4"
        assert place["PADDLE_TRAINER_ID"] == place["FLAGS_selected_gpus"] == str(rank)
        assert "http_proxy" not in place
        assert json.loads(Path("logs", f"workerlog.{rank}").read_text()) == place


@pytest.mark.grid
def test_a_rank_that_aborts_ends_the_other_and_the_launch_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in CLOUD.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    code = SAYS + failing(tmp_path, 1, ranks="0").replace("PADDLE_TRAINERS_NUM", "TWO")
    monkeypatch.setenv("TWO", "2")  # this machine's of the four ranks
    assert paddle_launch.main([*FROM_CLOUD, "--started_port", "0", script(code)]) == 1
    out, err = capsys.readouterr()
    ports = [place["PADDLE_CURRENT_ENDPOINT"] for place in places(out)]
    assert ports == ["127.0.0.1:6170", "127.0.0.1:6171"]
    assert "rank 0 | breaks in start 0" in err
    assert "rank 1 stopped with SIGTERM" in err


def test_one_machine_has_free_ports_and_a_process_for_each_gpu(
    capsys: pytest.CaptureFixture[str],
) -> None:
    done = run("launch", "--selected_gpus=2,3", "--log_level=30", script(SAYS), "--log_dir=its")
    found = places(done.stdout)
    assert [place["FLAGS_selected_gpus"] for place in found] == ["2", "3"], done.stderr
    assert done.stderr == ""
    assert "selected_gpus: 2,3\n" in done.stdout
    assert "training_script_args: ['--log_dir=its']\n" in done.stdout
    assert paddle_launch.main(["--print_config=0", "script.py"]) == 0
    out = capsys.readouterr().out
    (alone,) = places(out)
    assert "FLAGS_selected_gpus" not in alone
    assert "selected_gpus" not in out.replace(json.dumps(alone), "")


def test_machines_without_the_cloud_have_ports_from_6070_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ips = ["--cluster_node_ips", "127.0.0.1,127.0.0.2", "--node_ip", "127.0.0.2"]
    assert paddle_launch.main([*ips, script(SAYS)]) == 0
    (place,) = places(capsys.readouterr().out)
    assert place["PADDLE_TRAINER_ENDPOINTS"] == "127.0.0.1:6070,127.0.0.2:6070"
    assert place["PADDLE_TRAINER_ID"] == "1"


@pytest.mark.parametrize("given", [True, False])
def test_several_machines_without_a_secret_are_told_of_on_one_line(
    given: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("JAXFLEET_SECRET_FILE", raising=False)
    if given:
        secret = tmp_path / "secret"
        secret.touch(mode=0o600)
        secret.write_text("5" * 64)
        monkeypatch.setenv("JAXFLEET_SECRET_FILE", str(secret))
    ips = ["--cluster_node_ips", "127.0.0.1,127.0.0.2", "--node_ip", "127.0.0.2"]
    assert paddle_launch.main([*ips, script("")]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "JAXFLEET_SECRET" in line]
    assert len(said) == (0 if given else 1)


def test_one_machine_is_not_told_of_a_secret(capsys: pytest.CaptureFixture[str]) -> None:
    assert paddle_launch.main(["--print_config=0", script("")]) == 0
    assert "JAXFLEET_SECRET_FILE" not in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["PADDLE_TRAINERS", "POD_IP", "PADDLE_TRAINER_ID"])
def test_what_the_cloud_does_not_say_is_an_error(
    monkeypatch: pytest.MonkeyPatch, missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in CLOUD.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    words = [*FROM_CLOUD, script(SAYS)]
    with pytest.raises(AssertionError, match=f"environment variable {missing} is not set"):
        paddle_launch.launch(words)
    assert paddle_launch.main(words) == 2
    assert f"{missing} is not set" in capsys.readouterr().err


def test_a_machine_that_is_none_of_the_jobs_is_refused() -> None:
    ips = ["--cluster_node_ips", "10.0.0.1,10.0.0.2", "--node_ip", "10.0.0.3"]
    with pytest.raises(AssertedError, match=r"this machine, 10\.0\.0\.3, is none of"):
        paddle_launch.launch([*ips, script(SAYS)])
    with pytest.raises(AssertedError, match="GPU 'x' is not a number"):
        paddle_launch.launch(["--selected_gpus", "x", script(SAYS)])
    assert run("launch", "nowhere.py").returncode == 2


def test_launch_ps_starts_servers_and_workers_whatever_it_prints() -> None:
    port = free_ports(2)
    code = SAYS + f"\nif os.environ['TRAINING_ROLE'] == 'PSERVER': {ENDS}\n"
    words = ["--print_config=", f"--start_port={port}", "--worker_num=3", script(code), "--its=1"]
    done = run("launch_ps", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" | {") == len(done.stdout.splitlines())  # and no configuration
    for at in range(2):
        server = json.loads(Path("logs", f"serverlog.{at}").read_text())
        assert server["PADDLE_PSERVERS_IP_PORT_LIST"] == f"127.0.0.1:{port},127.0.0.1:{port + 1}"
        assert (server["POD_IP"], server["PADDLE_PORT"]) == ("127.0.0.1", str(port + at))
        assert (server["TRAINING_ROLE"], server["PADDLE_TRAINERS_NUM"]) == ("PSERVER", "3")
    for at in range(3):
        worker = json.loads(Path("logs", f"workerlog.{at}").read_text())
        assert (worker["TRAINING_ROLE"], worker["PADDLE_TRAINER_ID"]) == ("TRAINER", str(at))
        assert worker["PADDLE_PSERVERS_IP_PORT_LIST"] == server["PADDLE_PSERVERS_IP_PORT_LIST"]
        assert "PADDLE_PORT" not in worker
    said = done.stderr
    first = said.index("all workers exit, going to finish parameter server")
    assert first < said.index("all parameter server are killed")


def test_launch_ps_reports_a_worker_that_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "import os\nif os.environ['TRAINING_ROLE'] == 'TRAINER': raise SystemExit(3)\n"
    port = free_ports(2)
    words = [f"--start_port={port}", "--worker_num=1", "--print_config=False"]
    assert paddle_launch_ps.main([*words, script(code + noting(tmp_path) + IDLE)]) == 3
    out, err = capsys.readouterr()
    assert "trainer 0 ended with exit code 3" in err
    assert "are killed" not in err
    assert out == ""
    assert noted(tmp_path, "trainer") == []


def test_launch_ps_takes_endpoints() -> None:
    port = free_ports(2)
    endpoints = f"127.0.0.2:{port},127.0.0.1:{port}"
    code = SAYS + f"\nif os.environ['TRAINING_ROLE'] == 'PSERVER': {ENDS}\n"
    words = ["--endpoints", endpoints, "--worker_num=1", "--cluster_node_ips=a,b"]
    done = run("launch_ps", *words, script(code))
    assert done.returncode == 0, done.stderr
    server = json.loads(Path("logs", "serverlog.0").read_text())
    assert server["PADDLE_PSERVERS_IP_PORT_LIST"] == endpoints
    assert (server["POD_IP"], server["PADDLE_PORT"]) == ("127.0.0.2", str(port))
    assert "starts all processes on this machine" in done.stderr
    with pytest.raises(StrategyError, match="2 servers have 1 endpoints"):
        paddle_launch_ps.launch(["--endpoints", "a:1", "script.py"])


def test_both_have_paddles_names() -> None:
    jaxfleet.compat.install()
    try:
        package = import_module("paddle.distributed")
        assert package.launch.launch is paddle_launch.launch
        assert import_module("paddle.distributed.launch_ps").launch is paddle_launch_ps.launch
    finally:
        jaxfleet.compat.uninstall()
