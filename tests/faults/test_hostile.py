"""A server under attack keeps working, and holds little memory for the attacker."""

import json
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zmq

from jaxfleet.ps.server import ServerOptions
from jaxfleet.transport.codec import decode
from jaxfleet.transport.messages import Kind, Limits, Message, Plain, Tensor
from tests.faults.cluster import Jobs, check_same, memory_mb
from tests.faults.conftest import Undisturbed
from tests.faults.hostile import frames, messages, valid
from tests.ps.server.common import SGD, Bench, error_of, hello, sgd_after, sgd_grads, sgd_state

FRAMES = 12_000
ATTACK_S = 40.0
LONGEST_WAIT_MS = 50
SEED = 20240607


@pytest.mark.grid
@pytest.mark.processes
@pytest.mark.timeout(400)
def test_ten_thousand_harmful_frames_change_nothing_in_a_job_that_is_under_way(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    options = ["--kind=clip", "--steps=14", "--pause=0.3", "--step-timeout=120"]
    with Jobs(tmp_path, servers=2, step_s=120.0, lost_s=60.0, options=options) as jobs:
        servers, trainers = jobs.all_servers(), jobs.all_trainers()
        trainers[0].reaches("step 2.")
        before = [memory_mb(one.process.pid) for one in servers]

        def hold() -> None:  # so that the job outlives the attack
            if "step 8." in trainers[1].text():
                trainers[1].send(signal.SIGSTOP)

        with zmq.Context() as context:
            answers = attack(context, jobs.endpoints, jobs.job, hold)
        trainers[1].send(signal.SIGCONT)
        after = [memory_mb(one.process.pid) for one in servers]
        assert [one.ends() for one in (*trainers, *servers)] == [0, 0, 0, 0]
        check_same(jobs.results(), undisturbed("clip", 14))
        assert max(new - old for new, old in zip(after, before, strict=True)) < 150
        assert answers["error"] > FRAMES / 4
        stats = json.loads(jobs.result(0).with_suffix(".json").read_text())
        assert all(one["rejected"] > FRAMES / 20 for one in stats)
        assert all(one["errors"] > FRAMES / 20 for one in stats)
        assert answers.keys() <= {"error", "heartbeat"}


def attack(
    context: "zmq.Context[zmq.Socket[bytes]]",
    endpoints: tuple[str, ...],
    job: str,
    meanwhile: Callable[[], None],
) -> dict[str, int]:
    """Sends frames on several connections; returns the number of answers of each kind.

    A server cuts a connection that sends much before its hello; frames queued for it are dropped.
    """
    draw = random.Random(SEED)
    made = frames(valid(endpoints, job), draw)
    lines = [context.socket(zmq.DEALER) for _ in range(4)]
    for at, line in enumerate(lines):
        line.setsockopt(zmq.LINGER, 0)
        line.connect(f"tcp://{endpoints[at % len(endpoints)]}")
    until = time.monotonic() + ATTACK_S
    for count in range(FRAMES):
        frame, line = next(made), lines[count % len(lines)]
        is_open = bool(line.poll(LONGEST_WAIT_MS, zmq.POLLOUT))
        if is_open:
            line.send_multipart(frame)
        if count % 100 == 0 or not is_open:
            meanwhile()
        if time.monotonic() > until:
            break
    answers: dict[str, int] = {}
    until = time.monotonic() + 60.0
    poller = zmq.Poller()
    for line in lines:
        poller.register(line, zmq.POLLIN)
    while time.monotonic() < until and (ready := dict(poller.poll(2000))):
        meanwhile()
        for line in ready:
            kind = decode(line.recv_multipart(), Limits()).kind.value
            answers[kind] = answers.get(kind, 0) + 1
    for line in lines:
        line.close()
    return answers


def well_named() -> list[Message]:
    """Returns messages of the trainers of a small server."""
    found = []
    for plain in valid(["127.0.0.1:7001"], "j"):
        message = plain
        if message.kind is Kind.HELLO:
            message = replace(message, body=hello(1))
        if message.kind is Kind.PULL:
            message = replace(message, body={"names": ["w.block0", "b"]})
        if message.kind in {Kind.PUSH, Kind.ASSIGN}:
            arrays = sgd_grads(1, 1) if message.kind is Kind.PUSH else sgd_state()
            tensors = tuple(Tensor(name, array + 1) for name, array in arrays.items())
            message = replace(message, step=1, tensors=tensors)
        found.append(message)
    return found


def check_goes_on(bench: Bench) -> None:
    """Checks that the steps of the real trainers have their usual results."""
    assert bench.core.failure is None
    for step in (1, 2):
        for trainer in (0, 1):
            bench.push(trainer, step, sgd_grads(trainer, step))
    for name, value in bench.pull(0, 2, "w.block0", "w.block1", "b").items():
        np.testing.assert_array_equal(value, sgd_after(2)[name])


def test_who_said_no_hello_changes_nothing_whatever_it_sends() -> None:
    bench, draw = Bench().started(SGD, sgd_state()), random.Random(SEED)
    made = messages(well_named(), draw)
    for count in range(10_000):
        replies = bench.core.handle(b"stranger %d" % (count % 7), next(made))
        assert all(m.kind in {Kind.ERROR, Kind.HEARTBEAT} for _, m in replies)
        assert not bench.core.take_tasks()
    check_goes_on(bench)


def test_a_trainer_of_the_job_cannot_break_the_server() -> None:
    bench, draw = Bench().started(SGD, sgd_state()), random.Random(SEED)
    made = messages(well_named(), draw)
    for _ in range(10_000):
        message = next(made)
        if message.kind is not Kind.BYE:
            bench.core.handle(b"1", message)
            bench.core.run_tasks()
    assert bench.core.failure is None
    assert not bench.core.finished


def test_what_waits_for_others_is_bounded() -> None:
    bench = Bench(ServerOptions(queued_bytes=1 << 20)).started(SGD, sgd_state())
    block = {"x": np.zeros(1 << 12, np.uint8)}
    codes = []
    for at in range(2000):
        body: dict[str, Plain] = {"key": f"k{at}", "how": "gather"}
        codes += [m.body["error"] for _, m in bench.send(1, Kind.REDUCE, 1, body, block)]
    assert 0 < 2000 - len(codes) <= 256
    assert set(codes) == {"bad_message"}
    many = {"huge": np.zeros(1 << 21, np.uint8)}
    assert error_of(bench.send(0, Kind.ASSIGN, 0, {"replace": False}, many))[0] == "bad_message"
    for _ in range(1000):
        pulled = bench.send(1, Kind.PULL, 9, {"names": ["b"]})
        if pulled:
            break
    assert error_of(pulled)[0] == "bad_message"


def test_an_error_repeats_little_of_what_it_is_about() -> None:
    bench = Bench().started(SGD, sgd_state())
    bodies: list[tuple[Kind, dict[str, Plain]]] = [
        (Kind.HELLO, hello(0, job=["x" * 100] * 10_000)),
        (Kind.HELLO, hello(0, program="x" * 1_000_000)),
        (Kind.REDUCE, {"key": "x" * 1_000_000, "how": "y" * 1_000_000}),
        (Kind.PULL, {"names": ["x" * 1_000_000]}),
    ]
    for kind, body in bodies:
        assert len(error_of(bench.send(0, kind, body=body))[1]) < 2100


def test_a_program_that_was_defined_stays() -> None:
    bench = Bench().started(SGD, sgd_state())
    for _ in range(3):
        assert bench.one(1, Kind.DEFINE, body={"program": SGD}).kind is Kind.OK
        body: dict[str, Plain] = {"program": SGD.replace("0.5", "0.25")}
        assert error_of(bench.send(1, Kind.DEFINE, body=body))[0] == "refused"
    check_goes_on(bench)
