"""A server's loop: messages in, answers out, work in its own thread."""

import itertools
import queue
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxfleet.ps.server import Server, ServerCore, ServerOptions
from jaxfleet.ps.server.block_executor import BlockExecutor
from jaxfleet.ps.server.checkpoints import RecoveryCheckpoints
from jaxfleet.transport.memory_network import MemoryNetwork
from jaxfleet.transport.messages import Kind, Message, Peer, Plain, Tensor
from tests.ps.server.common import CACHE, ENDPOINT, SGD, hello, sgd_after, sgd_grads, sgd_state

NUMBERS = itertools.count(1)


class QueueListener:
    """A fake listener: two queues."""

    endpoint = ENDPOINT
    rejected = 0

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[tuple[Peer, Message] | None] = queue.SimpleQueue()
        self.outbox: queue.SimpleQueue[tuple[Peer, Message]] = queue.SimpleQueue()

    def receive(self, timeout_s: float) -> tuple[Peer, Message] | None:
        try:
            return self.inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def send(self, peer: Peer, message: Message) -> None:
        self.outbox.put((peer, message))

    def trust(self, peer: Peer) -> None:
        pass

    def ended(self) -> tuple[Peer, ...]:
        return ()

    def wake(self) -> None:
        self.inbox.put(None)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("threaded", [True, False])
def test_a_server_serves_until_all_said_bye(threaded: bool) -> None:
    listener = QueueListener()
    core = ServerCore(ENDPOINT, CACHE, time.monotonic)
    server = Server(core, listener, connect=MemoryNetwork().connect, threaded=threaded)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(server.serve()), daemon=True)
    thread.start()
    begin(listener)
    for trainer in (0, 1):
        say(listener, trainer, Kind.PUSH, {}, sgd_grads(trainer, 1), step=1)
    say(listener, 1, Kind.PULL, {"names": ["b"]}, step=1)
    values = listener.outbox.get(timeout=30)[1]
    np.testing.assert_array_equal(values.tensors[0].array, sgd_after(1)["b"])
    for trainer in (0, 1):
        say(listener, trainer, Kind.BYE)
    thread.join(30)
    assert codes == [0]


def test_work_that_took_long_is_done_on_a_thread_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    took = {1: 0.001, 2: 10.0, 3: 0.001}  # seconds, of the preceding step
    threads: dict[int, set[str]] = {step: set() for step in took}
    step = 0
    run = BlockExecutor.run

    def watched(executor: BlockExecutor, *args: Any) -> Any:
        threads[step].add(threading.current_thread().name)
        return run(executor, *args)

    monkeypatch.setattr(BlockExecutor, "run", watched)
    monkeypatch.setattr(BlockExecutor, "took_s", lambda *_: took[step])
    listener = QueueListener()
    core = ServerCore(ENDPOINT, CACHE, time.monotonic)
    server = Server(core, listener, connect=MemoryNetwork().connect)
    thread = threading.Thread(target=server.serve, name="serving", daemon=True)
    thread.start()
    begin(listener)
    for step in took:  # `watched` reads it
        for trainer in (0, 1):
            say(listener, trainer, Kind.PUSH, {}, sgd_grads(trainer, step), step=step)
        say(listener, 1, Kind.PULL, {"names": ["b"]}, step=step)
        values = listener.outbox.get(timeout=30)[1]
        np.testing.assert_array_equal(values.tensors[0].array, sgd_after(step)["b"])
    server.stop()
    thread.join(10)
    assert threads == {1: {"serving"}, 2: {"jaxfleet server"}, 3: {"serving"}}


def test_a_checkpoint_is_written_on_a_thread_beside_that_of_the_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    writing, go_on, save = threading.Event(), threading.Event(), RecoveryCheckpoints.save

    def slow(own: RecoveryCheckpoints, plan: Any, arrays: Any, progress: Any, **named: Any) -> Any:
        if progress.number > 0:
            writing.set()
            assert go_on.wait(30)
        return save(own, plan, arrays, progress, **named)

    monkeypatch.setattr(RecoveryCheckpoints, "save", slow)
    monkeypatch.setattr(BlockExecutor, "took_s", lambda *_: 10.0)  # steps have a thread, too
    listener = QueueListener()
    core = ServerCore(
        ENDPOINT, CACHE, time.monotonic, ServerOptions(server=0, checkpoint_dir=tmp_path)
    )
    server = Server(core, listener, connect=MemoryNetwork().connect)
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    begin(listener)
    for step in (1, 2):
        for trainer in (0, 1):
            say(listener, trainer, Kind.PUSH, {}, sgd_grads(trainer, step), step=step)
        if step == 1:
            say(listener, 0, Kind.SAVE, {}, step=1)
            assert writing.wait(30)
    say(listener, 1, Kind.PULL, {"names": ["b"]}, step=2)
    values = listener.outbox.get(timeout=30)[1]
    np.testing.assert_array_equal(values.tensors[0].array, sgd_after(2)["b"])
    go_on.set()
    assert listener.outbox.get(timeout=30)[1].body["step"] == 1
    server.stop()
    thread.join(10)


def test_a_server_stops_when_it_is_told_to() -> None:
    listener = QueueListener()
    core = ServerCore(ENDPOINT, CACHE, time.monotonic)
    server = Server(core, listener, connect=MemoryNetwork().connect)
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    server.stop()
    thread.join(10)
    assert not thread.is_alive()


def test_a_block_that_fails_ends_the_server_with_a_code() -> None:
    listener = QueueListener()
    core = ServerCore(ENDPOINT, CACHE, time.monotonic)
    server = Server(core, listener, connect=MemoryNetwork().connect)
    say(listener, 0, Kind.HELLO, hello(0))
    say(listener, 0, Kind.DEFINE, {"program": SGD.replace("sub(b, s2)", "sub(b, w.block1)")})
    assert server.serve() == 1
    kinds = [listener.outbox.get(timeout=1)[1].kind for _ in range(3)]
    assert kinds == [Kind.WELCOME, Kind.OK, Kind.ERROR]


def begin(listener: QueueListener) -> None:
    """Brings a server to step 0, with two trainers."""
    say(listener, 0, Kind.HELLO, hello(0))
    say(listener, 1, Kind.HELLO, hello(1))
    say(listener, 0, Kind.DEFINE, {"program": SGD})
    say(listener, 0, Kind.ASSIGN, {}, sgd_state())
    kinds = [listener.outbox.get(timeout=30)[1].kind for _ in range(4)]
    assert kinds == [Kind.WELCOME, Kind.WELCOME, Kind.OK, Kind.OK]


def say(
    listener: QueueListener,
    trainer: int,
    kind: Kind,
    body: dict[str, Plain] | None = None,
    arrays: dict[str, np.ndarray] | None = None,
    *,
    step: int = 0,
) -> None:
    tensors = tuple(Tensor(name, array) for name, array in (arrays or {}).items())
    message = Message(kind, f"trainer {trainer}", step, next(NUMBERS), body or {}, tensors)
    listener.inbox.put((b"%d" % trainer, message))
