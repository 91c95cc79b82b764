"""Jobs of servers and trainers on several machines, simulated by addresses of this one."""

from pathlib import Path

import pytest

from jaxfleet.launch import Nodes
from tests.launch.jobs import WAIT_S, free_ports
from tests.launch.ranks import SAYS, command, places

pytestmark = pytest.mark.processes

# A server dies once, when its own machine's trainers are done, and ends when all are.
SERVES = """
import pathlib, time
here = pathlib.Path({folder!r})
if os.environ["TRAINING_ROLE"] == "PSERVER":
    died = here / "died"
    while len(list(here.glob("trained*"))) < (3 if died.exists() else 2):
        time.sleep(0.05)
    if not died.exists():
        time.sleep(0.5)
        died.touch()
        raise SystemExit(1)
    raise SystemExit(0)
if os.environ["PADDLE_TRAINER_ID"] == "2":
    while not (here / "died").exists():
        time.sleep(0.05)
    time.sleep(3)  # longer than the grace of the other machine's launch
(here / ("trained" + os.environ["PADDLE_TRAINER_ID"])).touch()
"""


def test_machines_share_out_what_they_start() -> None:
    three = Nodes(("a", "b", "c"), "b")
    assert [list(three.share(4, node)) for node in range(3)] == [[0, 1], [2], [3]]
    assert [list(three.share(2, node)) for node in range(3)] == [[0], [1], []]
    assert three.endpoints([2, 1, 0], 6170) == ("a:6170", "a:6171", "b:6170")


@pytest.mark.grid
def test_servers_stay_until_the_trainers_of_all_machines_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXFLEET_MEETING_DIR", "/all/see/it")
    port = free_ports(1)
    code = SAYS + SERVES.format(folder=str(tmp_path))
    words = ["--servers", "1", "--trainers", "3", "--servers-run-script", "--job", "one"]
    words += ["--nodes", "127.0.0.1,127.0.0.2", "--port", str(port), "--timeout", str(WAIT_S)]
    words += ["--insecure"]
    with (
        command(tmp_path, code, *words, "--node", "127.0.0.1") as first,
        command(tmp_path, code, *words, "--node", "127.0.0.2") as second,
    ):
        out, err = first.communicate(timeout=2 * WAIT_S)
        also, error = second.communicate(timeout=2 * WAIT_S)
    assert (first.returncode, second.returncode) == (0, 0), err + error
    assert "server 0 ended with exit code 1" in err
    assert "it is started again (1 of 3)" in err
    assert "server 0 ended well" in err
    servers = [place for place in places(out) if place["TRAINING_ROLE"] == "PSERVER"]
    assert len(servers) == 2
    for place in places(out + also):
        assert place["PADDLE_PSERVERS_IP_PORT_LIST"] == f"127.0.0.1:{port}"
        assert (place["PADDLE_TRAINERS_NUM"], place["JAXFLEET_JOB"]) == ("3", "one")
        assert place["JAXFLEET_MEETING_DIR"] == "/all/see/it"
    trainers = [place["PADDLE_TRAINER_ID"] for place in places(also)]
    assert trainers == ["2"]


def test_a_machine_without_a_process_of_the_job_says_so(tmp_path: Path) -> None:
    words = ["--job", "one", "--nodes", "127.0.0.1,127.0.0.2", "--node", "127.0.0.2", "--insecure"]
    with command(tmp_path, "", *words) as launcher:
        _, err = launcher.communicate(timeout=WAIT_S)
    assert launcher.returncode == 0
    assert "this machine has none of the job's processes" in err
