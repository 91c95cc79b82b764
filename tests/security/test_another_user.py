"""Another user of the machine learns nothing of a job, changes nothing, and uses few resources."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxfleet.ps.server import Server, ServerCore, ServerOptions
from jaxfleet.transport.messages import Connections, Kind, Message, Plain, Tensor
from jaxfleet.transport.zmq.network import ZmqNetwork
from jaxfleet.transport.zmq.server import ZmqListener
from tests.faults.cluster import SETTINGS, Jobs, check_same
from tests.faults.conftest import Undisturbed, undisturbed
from tests.ps.server.common import CACHE, SGD, hello, sgd_after, sgd_grads, sgd_state
from tests.security import stranger
from tests.transport.test_zmq_network import QUICK, SECRET

__all__ = ["undisturbed"]  # a fixture

ANSWER_S = 60.0


def descriptors() -> int:
    return sum(1 for _ in Path("/dev/fd").iterdir())


def attack(endpoint: str, folder: Path, seconds: float = 0.0) -> "subprocess.Popen[str]":
    """Starts the attack of another user, if this one may start it."""
    words = [sys.executable, stranger.__file__, endpoint, str(folder), str(seconds)]
    pipe = subprocess.PIPE
    return subprocess.Popen(words, env=os.environ | SETTINGS, stdout=pipe, stderr=pipe, text=True)


def found_by(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """Returns the results of an attack."""
    out, error = process.communicate(timeout=ANSWER_S)
    assert process.returncode == 0, error
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


@contextmanager
def serving(
    folder: Path, secret: bytes | None = SECRET
) -> Iterator[tuple[ServerCore, ZmqListener]]:
    """Serves a job in this process, by default with a secret."""
    network = ZmqNetwork(secret=secret)
    listener = network.listen("127.0.0.1:0")
    options = ServerOptions(server=0, job="j", trainers=2, save_dirs=(folder,))
    core = ServerCore(listener.endpoint, CACHE, time.monotonic, options)
    server = Server(core, listener, connect=network.connect)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield core, listener
    finally:
        server.stop()
        thread.join(30)


def ask(
    lines: Connections, trainer: int, kind: Kind, body: dict[str, Plain], **more: Any
) -> Message:
    arrays, step = more.get("arrays", {}), more.get("step", 0)
    tensors = tuple(Tensor(name, array) for name, array in arrays.items())
    lines.send(0, Message(kind, f"trainer {trainer}", step, more.get("number", 1), body, tensors))
    if kind is Kind.PUSH:
        return Message(kind, "")
    answer = lines.receive(ANSWER_S)
    assert answer is not None
    return answer[1]


def train(
    listener: ZmqListener, folder: Path, secret: bytes | None = SECRET
) -> dict[str, np.ndarray]:
    """Trains a step as both trainers of the job, and saves; returns the parameters."""
    network = ZmqNetwork(secret=secret)
    lines = [network.connect([listener.endpoint]) for _ in range(2)]
    for number, line in enumerate(lines):
        body = hello(number, servers=[listener.endpoint])
        assert ask(line, number, Kind.HELLO, body).kind is Kind.WELCOME
    first = lines[0]
    assert ask(first, 0, Kind.DEFINE, {"program": SGD}, number=2).kind is Kind.OK
    begins = {"arrays": sgd_state(), "number": 3}
    assert ask(first, 0, Kind.ASSIGN, {"replace": False}, **begins).kind is Kind.OK
    for number, line in enumerate(lines):
        ask(line, number, Kind.PUSH, {}, arrays=sgd_grads(number, 1), step=1, number=4)
    path: dict[str, Plain] = {"path": str(folder / "saved")}
    assert ask(first, 0, Kind.SAVE, path, step=1, number=5).kind is Kind.OK
    wanted: dict[str, Plain] = {"names": ["w.block0", "b"]}
    values = ask(first, 0, Kind.PULL, wanted, step=1, number=6)
    assert values.kind is Kind.VALUES
    found = {tensor.name: tensor.array.copy() for tensor in values.tensors}
    for line in lines:
        line.close()
    return found


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="the attack reads /proc, and abstract sockets")
def test_another_user_learns_nothing_changes_nothing_and_takes_little(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs").chmod(0o777)
    with serving(tmp_path / "ours") as (core, listener):
        before = descriptors()
        found = found_by(attack(listener.endpoint, tmp_path / "theirs"))
        if os.getuid() == 0:
            assert (found["user"], found["secrets"]) == (stranger.NOBODY, [])
        ways = ("in clear", "by CURVE", "by a Unix socket")
        assert [found[way] for way in ways] == [0, 0, 0]
        assert found["poured"] < stranger.LARGE / 4
        assert found["opened"] > stranger.IDLE / 2  # others were cut during setup
        assert found["left"] <= stranger.OF_AN_ADDRESS
        assert descriptors() < before + 64
        assert not core.trainers.facts
        assert not core.trainers.refused
        assert core.metrics(0.0).messages == {}
        parameters = train(listener, tmp_path / "ours")
        for name, array in parameters.items():
            np.testing.assert_array_equal(array, sgd_after(1)[name])
        assert core.failure is None
    assert list((tmp_path / "theirs").iterdir()) == []
    assert any((tmp_path / "ours" / "saved").iterdir())


@pytest.mark.few(2)
@pytest.mark.parametrize("secret", [SECRET, None])
@pytest.mark.parametrize("shakes", [False, True])
def test_who_says_a_byte_now_and_then_is_cut(shakes: bool, secret: bytes | None) -> None:
    network = ZmqNetwork(secret=secret, timing=QUICK)
    host, _, port = (listener := network.listen("127.0.0.1:0")).endpoint.rpartition(":")
    spoken = stranger.NULL + (b"" if shakes else bytes(500))
    with closing(listener), socket.create_connection((host, int(port))) as line:
        if shakes:
            line.sendall(spoken)
        until, sent = time.monotonic() + 8.0, 0
        while stranger.is_open(line) and time.monotonic() < until:
            with suppress(OSError):
                line.send(spoken[sent : sent + 1] if not shakes else b"\x04")
            sent += 1
            time.sleep(0.1)
        assert time.monotonic() < until


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel does not count bytes")
def test_who_says_no_hello_takes_little_of_a_server_without_a_secret(tmp_path: Path) -> None:
    with serving(tmp_path, None) as (core, listener):
        before = descriptors()
        words = [sys.executable, stranger.__file__, listener.endpoint, "--insecure"]
        pipe = subprocess.PIPE
        environment = os.environ | SETTINGS
        with subprocess.Popen(
            words, env=environment, stdout=pipe, stderr=pipe, text=True
        ) as process:
            found = found_by(process)
        assert found["opened"] > stranger.IDLE / 2
        assert found["left"] <= stranger.OF_AN_ADDRESS_WITHOUT_SECRET
        assert found["poured"] < stranger.LARGE / 2
        assert descriptors() < before + 2 * stranger.OF_AN_ADDRESS_WITHOUT_SECRET
        assert not core.trainers.facts
        parameters = train(listener, tmp_path, None)
        for name, array in parameters.items():
            np.testing.assert_array_equal(array, sgd_after(1)[name])


@pytest.mark.grid
@pytest.mark.processes
@pytest.mark.timeout(400)
@pytest.mark.skipif(sys.platform != "linux", reason="prlimit is of Linux")
def test_a_job_of_few_descriptors_saves_and_ends_as_ever_while_it_is_attacked(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    (tmp_path / "secret").write_text("a secret that nobody guesses")
    (tmp_path / "secret").chmod(0o600)
    options = ["--kind=clip", "--steps=14", "--pause=0.5", "--step-timeout=60"]
    few = ["prlimit", "--nofile=400:400"]
    with Jobs(
        tmp_path / "job",
        servers=2,
        step_s=60.0,
        returns_s=60.0,
        options=[*options, "--replay-bytes=2000"],  # a checkpoint every few steps
        secret=tmp_path / "secret",
    ) as jobs:
        servers = [jobs.server(at, prefix=few) for at in range(2)]
        trainers = jobs.all_trainers()
        trainers[0].reaches("step 2.")
        attacks = [attack(one, tmp_path, seconds=8.0) for one in jobs.endpoints]
        for one in attacks:
            assert one.stdout is not None
            assert one.stdout.readline() == "ready\n"
            assert trainers[0].process.poll() is None, "the job was over before the attack was"
        for one in attacks:
            found = found_by(one)
            assert found["opened"] > stranger.IDLE / 2  # others were cut during setup
            assert found["left"] <= stranger.OF_AN_ADDRESS
        assert [one.ends() for one in (*trainers, *servers)] == [0, 0, 0, 0]
        check_same(jobs.results(), undisturbed("clip", 14))
