"""Small servers' programs, and a server driven without a network."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxfleet.lower import ExecutableCache
from jaxfleet.ps.server import ServerCore, ServerOptions
from jaxfleet.transport.messages import PROTOCOL, Kind, Message, Plain, Tensor

CACHE = ExecutableCache()
ENDPOINT = "127.0.0.1:7001"

SGD = """
program p.pserver0 {endpoint="127.0.0.1:7001", endpoints=["127.0.0.1:7001"], pserver_id=0, role="pserver", slices=[["w", [4, 3]], ["b", [2]]], trainers=2}
  data  w@GRAD.block0.trainer_0: f32[4,2]
  data  w@GRAD.block0.trainer_1: f32[4,2]
  data  w@GRAD.block1.trainer_0: f32[3,2]
  data  w@GRAD.block1.trainer_1: f32[3,2]
  data  b@GRAD.trainer_0: f32[2]
  data  b@GRAD.trainer_1: f32[2]
  param w.block0: f32[4,2]
  param w.block1: f32[3,2]
  param b: f32[2]
  block 0
    rpc
      listen_and_serv(X=[w@GRAD.block0.trainer_0, w@GRAD.block0.trainer_1, w@GRAD.block1.trainer_0, w@GRAD.block1.trainer_1, b@GRAD.trainer_0, b@GRAD.trainer_1]) {combine_block_id=-1, grad_to_block_id=["w@GRAD.block0:1", "w@GRAD.block1:2", "b@GRAD:3"], lr_decay_block_id=-1, optimize_blocks=[^1, ^2, ^3], part_block_ids=[]}
  block 1
    optimize
      Out=w@GRAD.block0: f32[4,2] = sum(X=[w@GRAD.block0.trainer_0, w@GRAD.block0.trainer_1])
      s0: f32[4,2] = jax.mul(w@GRAD.block0, 0.5:f32)
      w.block0 = jax.sub(w.block0, s0)
  block 2
    optimize
      Out=w@GRAD.block1: f32[3,2] = sum(X=[w@GRAD.block1.trainer_0, w@GRAD.block1.trainer_1])
      s1: f32[3,2] = jax.mul(w@GRAD.block1, 0.5:f32)
      w.block1 = jax.sub(w.block1, s1)
  block 3
    optimize
      Out=b@GRAD: f32[2] = sum(X=[b@GRAD.trainer_0, b@GRAD.trainer_1])
      s2: f32[2] = jax.mul(b@GRAD, 0.5:f32)
      b = jax.sub(b, s2)
"""  # noqa: E501
SGD_SHAPES = {"w.block0": (4, 2), "w.block1": (3, 2), "b": (2,)}
SGD_GRADS = {"w.block0": "w@GRAD.block0", "w.block1": "w@GRAD.block1", "b": "b@GRAD"}

MOMENTUM = """
program p.pserver0 {endpoint="127.0.0.1:7001", endpoints=["127.0.0.1:7001"], pserver_id=0, role="pserver", slices=[["w", [4, 3]]], trainers=2}
  data  w@GRAD.block0.trainer_0: f32[4,2]
  data  w@GRAD.block0.trainer_1: f32[4,2]
  data  w@GRAD.block1.trainer_0: f32[3,2]
  data  w@GRAD.block1.trainer_1: f32[3,2]
  param w.block0: f32[4,2]
  param w.block1: f32[3,2]
  state m/w.block0: f32[4,2]
  state m/w.block1: f32[3,2]
  state count: i32[]
  block 0
    temp rate: f32[]
    rpc
      listen_and_serv(X=[w@GRAD.block0.trainer_0, w@GRAD.block0.trainer_1, w@GRAD.block1.trainer_0, w@GRAD.block1.trainer_1]) {combine_block_id=-1, lr_decay_block_id=1, optimize_blocks=[^1, ^2, ^3], part_block_ids=[]}
  block 1
    lr_sched
      count = jax.add(count, 1:i32)
      as_float: f32[] = jax.convert_element_type(count) {new_dtype=f32, weak_type=false}
      rate = jax.div(1.0:f32, as_float)
  block 2 in 1
    optimize
      Out=w@GRAD.block0: f32[4,2] = sum(X=[w@GRAD.block0.trainer_0, w@GRAD.block0.trainer_1])
      h0: f32[4,2] = jax.mul(m/w.block0, 0.9:f32)
      m/w.block0 = jax.add(h0, w@GRAD.block0)
      s0: f32[4,2] = jax.mul(m/w.block0, rate)
      w.block0 = jax.sub(w.block0, s0)
  block 3 in 1
    optimize
      Out=w@GRAD.block1: f32[3,2] = sum(X=[w@GRAD.block1.trainer_0, w@GRAD.block1.trainer_1])
      h1: f32[3,2] = jax.mul(m/w.block1, 0.9:f32)
      m/w.block1 = jax.add(h1, w@GRAD.block1)
      s1: f32[3,2] = jax.mul(m/w.block1, rate)
      w.block1 = jax.sub(w.block1, s1)
"""  # noqa: E501


def clipping(server: int) -> str:
    """Returns a program of two servers that clip by the norm of all gradients."""
    own, other = f"w.block{server}", 1 - server
    return f"""
program p.pserver{server} {{endpoint="127.0.0.1:700{server + 1}", endpoints=["127.0.0.1:7001", "127.0.0.1:7002"], pserver_id={server}, role="pserver", slices=[["w", [3, 3]]], trainers=1}}
  data  g{server}.trainer_0: f32[3,2]
  param {own}: f32[3,2]
  block 0
    temp  g{server}: f32[3,2]
    temp  part0: f32[]
    temp  part1: f32[]
    temp  norm: f32[]
    rpc
      listen_and_serv(X=g{server}.trainer_0) {{combine_block_id=2, lr_decay_block_id=-1, optimize_blocks=[^1, ^2, ^3], part_block_ids=[1]}}
  block 1
    optimize
      Out=g{server} = sum(X=g{server}.trainer_0)
      square: f32[3,2] = jax.mul(g{server}, g{server})
      part{server} = jax.reduce_sum(square) {{axes=[0, 1]}}
  block 2
    rpc
      Out=part{other} = exchange(X=part{server}) {{endpoints=["127.0.0.1:7001", "127.0.0.1:7002"], epmap=["127.0.0.1:700{other + 1}"]}}
    optimize
      both: f32[] = jax.add(part0, part1)
      norm = jax.sqrt(both)
  block 3
    optimize
      unit: f32[3,2] = jax.div(g{server}, norm)
      {own} = jax.sub({own}, unit)
"""  # noqa: E501


def hello(number: int = 0, /, **changed: Any) -> dict[str, Plain]:
    body: dict[str, Plain] = {
        "protocol": PROTOCOL,
        "job": "j",
        "trainer": number,
        "trainers": 2,
        "servers": [ENDPOINT],
        "program": "abc",
    }
    body.update(changed)
    return body


@dataclass
class Bench:
    """A server under test, its clock, and its latest answers."""

    options: ServerOptions = field(default_factory=ServerOptions)
    endpoint: str = ENDPOINT
    now: float = 100.0
    numbers: int = 0

    def __post_init__(self) -> None:
        self.core = ServerCore(self.endpoint, CACHE, lambda: self.now, self.options)

    def send(
        self,
        trainer: int,
        kind: Kind,
        step: int = 0,
        body: dict[str, Plain] | None = None,
        arrays: dict[str, np.ndarray] | None = None,
        *,
        number: int | None = None,
        peer: bytes | None = None,
        run: bool = True,
    ) -> list[tuple[bytes, Message]]:
        """Sends a trainer's message, runs the resulting work, and returns all answers."""
        self.numbers += 1
        tensors = tuple(Tensor(name, array) for name, array in (arrays or {}).items())
        number = self.numbers if number is None else number
        message = Message(kind, f"trainer {trainer}", step, number, body or {}, tensors)
        replies = self.core.handle(peer or b"%d" % trainer, message)
        return [*replies, *self.core.run_tasks()] if run else replies

    def one(self, *args: Any, **named: Any) -> Message:
        """Sends a message that gets one answer."""
        ((_, message),) = self.send(*args, **named)
        return message

    def started(self, text: str, state: dict[str, np.ndarray], trainers: int = 2) -> "Bench":
        """Admits all trainers, and gives the server a program and a state."""
        for trainer in range(trainers):
            body = hello(trainer, trainers=trainers)
            assert self.one(trainer, Kind.HELLO, body=body).kind is Kind.WELCOME
        assert self.one(0, Kind.DEFINE, body={"program": text}).kind is Kind.OK
        assert self.one(0, Kind.ASSIGN, 0, {"replace": False}, state).kind is Kind.OK
        return self

    def wait(self, seconds: float) -> list[tuple[bytes, Message]]:
        """Advances the clock; returns the messages that the server sends by itself."""
        replies = []
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + 0.5, end)
            replies += self.core.tick(self.now)
        return replies

    def push(self, trainer: int, step: int, arrays: dict[str, np.ndarray]) -> Any:
        return self.send(trainer, Kind.PUSH, step, arrays=arrays)

    def pull(self, trainer: int, step: int, *names: str) -> dict[str, np.ndarray]:
        replies = self.send(trainer, Kind.PULL, step, {"names": list(names)})
        assert all(message.kind is Kind.VALUES for _, message in replies), replies
        return {t.name: t.array for _, message in replies for t in message.tensors}


def sgd_state() -> dict[str, np.ndarray]:
    return {name: drawn(name, 0, shape) for name, shape in SGD_SHAPES.items()}


def sgd_grads(trainer: int, step: int) -> dict[str, np.ndarray]:
    pairs = SGD_SHAPES.items()
    return {SGD_GRADS[n]: drawn(n, 10 * step + trainer + 1, shape) for n, shape in pairs}


def drawn(name: str, seed: int, shape: tuple[int, ...]) -> np.ndarray:
    draw = np.random.default_rng([seed, *name.encode()])
    return draw.standard_normal(shape).astype(np.float32)


def sgd_after(steps: int) -> dict[str, np.ndarray]:
    """Returns the parameters computed by numpy."""
    state = sgd_state()
    for step in range(1, steps + 1):
        first, second = sgd_grads(0, step), sgd_grads(1, step)
        for name, grad in SGD_GRADS.items():
            state[name] = state[name] - np.float32(0.5) * (first[grad] + second[grad])
    return state


def error_of(replies: list[tuple[bytes, Message]] | Message) -> tuple[str, str]:
    message = replies if isinstance(replies, Message) else replies[0][1]
    assert message.kind is Kind.ERROR, message
    return str(message.body["error"]), str(message.body["what"])
