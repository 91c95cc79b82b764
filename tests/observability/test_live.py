"""Metrics, `top` and the timeline of a job of real processes while it runs."""

import json
import socket
import threading
from pathlib import Path

import pytest

from jaxfleet.cli import main
from jaxfleet.launch.placement import Ports
from jaxfleet.observability import merge, scrape
from jaxfleet.transport.secret import metrics_token, read_secret
from tests.faults.cluster import PATIENT_S, Jobs

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

STEPS = 40
HTTP = b"HTTP/1.0 200 OK\r\n\r\n"


@pytest.mark.grid
def test_a_job_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ports = Ports(1, first=0)
    (address,) = ports.endpoints
    ports.close()
    monkeypatch.setenv("JAXFLEET_METRICS_PORT", address.rpartition(":")[2])
    monkeypatch.setenv("JAXFLEET_TRACE_DIR", str(tmp_path / "trace"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    secret = tmp_path / "secret"
    secret.write_text("a secret that nobody guesses")
    secret.chmod(0o600)
    options = [f"--steps={STEPS}", "--step-timeout=60"]
    codes: list[int] = []
    live = ["top", address, "--every=0.5", "--wait=120"]  # starts before the job
    top = threading.Thread(target=lambda: codes.append(main(live)))
    job = {"options": options, "step_s": 60.0, "lost_s": PATIENT_S, "secret": secret}
    with Jobs(tmp_path, **job) as jobs:  # type: ignore[arg-type]
        top.start()
        server, quick, slow = jobs.server(), jobs.trainer(0), jobs.trainer(1, "--pause=0.2")
        slow.reaches("step 8.")
        assert main(["top", address, "--once", "--every=1.5"]) == 0
        shown, waited = capsys.readouterr()
        check_token(address, secret, capsys)
        found = scrape(address, metrics_token(read_secret(secret)))
        assert [quick.ends(), slow.ends(), server.ends()] == [0, 0, 0]
        top.join(60)
        out, err = capsys.readouterr()
    assert "1 slowest" in shown, shown
    assert found.values["server_step"] >= 7
    assert found.values["received_bytes_total"] > 0 < found.values["sent_bytes_total"]
    late = {n: values["trainer_late_seconds_total"] for n, values in found.of_trainers.items()}
    assert late[1] > late[0]
    assert codes == [0]
    assert f"waiting up to 120 s for servers: {address}" in waited
    assert "the job has ended" in err
    assert "steps/s" in out
    check_timeline(merge(tmp_path / "trace"))


def check_token(address: str, secret: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checks the token, without which metrics are not served."""
    for wrong in (None, "another"):
        with pytest.raises(PermissionError, match="give --secret-file"):
            scrape(address, wrong)
    for words in ([], ["--secret-file", str(secret)]):
        assert main(["top", "--token", *words, address]) == 0
        assert metrics_token(read_secret(secret)) in capsys.readouterr().out


def check_timeline(timeline: dict[str, list[dict[str, object]]]) -> None:
    """Checks for every process's part of the job."""
    json.dumps(timeline)
    found = timeline["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}  # type: ignore[index]
    assert sorted(names.values()) == ["server 0", "trainer 0", "trainer 1"]
    spans = [(names[e["pid"]], str(e["name"])) for e in found if e["ph"] == "X"]
    for trainer in ("trainer 0", "trainer 1"):
        assert spans.count((trainer, "step")) == STEPS
        assert spans.count((trainer, "send")) >= STEPS
    assert ("trainer 0", "wait for pull") in spans  # the fast one waits for the slow one
    assert any(who == "server 0" for who, _ in spans)


def test_top_says_where_no_job_is(capsys: pytest.CaptureFixture[str]) -> None:
    ports = Ports(1, first=0)
    (address,) = ports.endpoints
    ports.close()
    assert main(["top", address, "--once"]) == 2
    assert f"no metrics at {address}" in capsys.readouterr().err
    for answer in (b"no HTTP at all\n", HTTP + b"\xff\xfe", HTTP + b"jaxfleet_server_step{ one\n"):
        with socket.create_server(("127.0.0.1", 0)) as stranger:
            thread = threading.Thread(target=_answers, args=(stranger, answer))
            thread.start()
            assert main(["top", str(stranger.getsockname()[1]), "--once"]) == 2
            thread.join()
        assert "is not a server or rank of jaxfleet's" in capsys.readouterr().err
    assert main(["top", "127.0.0.1:metrics", "--once"]) == 2
    assert "no metrics at 127.0.0.1:metrics" in capsys.readouterr().err
    assert main(["top", address, "--every=-1"]) == 2
    assert "--every is -1" in capsys.readouterr().err


def _answers(server: socket.socket, answer: bytes) -> None:
    line, _ = server.accept()
    with line:
        line.recv(1 << 16)
        line.sendall(answer)
