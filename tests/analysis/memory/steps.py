"""Training steps of many shapes, as programs: a drawn graph forward, and its gradients."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxfleet.ir import Block, Kind, Operator, Program, Role, Variable, verify
from jaxfleet.ir.program import Operands

FLOAT = 4  # bytes


@dataclass
class Net:
    """A forward graph: each node has a width and reads nodes before it.

    Attributes:
        widths: by node; a value is `f32[width]`.
        reads: by node, the nodes that it reads.
        params: the nodes that have a parameter.
    """

    widths: list[int] = field(default_factory=list)
    reads: list[tuple[int, ...]] = field(default_factory=list)
    params: set[int] = field(default_factory=set)

    def add(self, width: int, *reads: int, has_param: bool = False) -> int:
        self.widths.append(width)
        self.reads.append(reads)
        if has_param:
            self.params.add(len(self.widths) - 1)
        return len(self.widths) - 1


def chain(rng: random.Random, length: int) -> Net:
    """Draws layers in a row."""
    net = Net()
    for node in range(length):
        net.add(rng.randint(1, 9), *([node - 1] if node else []), has_param=node % 2 == 0)
    return net


def residual(rng: random.Random, blocks: int) -> Net:
    """Draws blocks of two layers with a residual connection."""
    net = Net()
    width, at = rng.randint(2, 6), 0
    net.add(width)
    for _ in range(blocks):
        inner = net.add(rng.randint(width, 4 * width), at, has_param=True)
        made = net.add(width, inner, has_param=True)
        at = net.add(width, at, made)
    return net


def branches(rng: random.Random, blocks: int) -> Net:
    """Draws blocks of two to three branches that are joined again."""
    net = Net()
    at = net.add(rng.randint(1, 9))
    for _ in range(blocks):
        ways = [net.add(rng.randint(1, 9), at, has_param=True) for _ in range(rng.randint(2, 3))]
        at = net.add(rng.randint(1, 9), *ways)
    return net


def u_net(rng: random.Random, depth: int) -> Net:
    """Draws a contracting and an expanding path, with skips between them."""
    net = Net()
    width, at, downs = 2 ** (depth + 1), net.add(2 ** (depth + 1)), []
    for _ in range(depth):
        at = net.add(width + rng.randint(0, 3), at, has_param=True)
        downs.append((at, width))
        width //= 2
        at = net.add(width, at)
    for skip, width in reversed(downs):
        at = net.add(width, at)
        at = net.add(width + rng.randint(0, 3), at, skip, has_param=True)
    return net


def program_of(net: Net, *, clips: bool = False) -> Program:
    """Returns the training step of a net: forward, backward, and an update for each parameter.

    The gradient of a node reads the node's inputs and outputs.

    Args:
        net: the net.
        clips: whether every update waits for all gradients.
    """
    made = _Step(net)
    for node in range(len(net.widths)):
        made.forward(node)
    for node in reversed(range(len(net.widths))):
        made.backward(node)
    made.updates(clips=clips)
    program = Program("net", made.outer, (Block(0, -1, made.inner, ops=tuple(made.ops)),))
    verify(program)
    return program


class _Step:
    def __init__(self, net: Net) -> None:
        self.net = net
        self.ops: list[Operator] = []
        self.outer = {"x": Variable("x", "f32", (1,), Kind.DATA)}
        self.inner: dict[str, Variable] = {}
        self.parts: dict[int, list[str]] = {}  # of each node's gradient

    def forward(self, node: int) -> None:
        reads = [f"h{at}" for at in self.net.reads[node]] or ["x"]
        if node in self.net.params:
            self.outer[f"w{node}"] = Variable(f"w{node}", "f32", (3,), Kind.PARAM)
            reads.append(f"w{node}")
        self._op(reads, {f"h{node}": self.net.widths[node]}, Role.FORWARD)

    def backward(self, node: int) -> None:
        gradient = self._sum(node)
        reads = [gradient, *(f"h{at}" for at in self.net.reads[node]), f"h{node}"]
        makes = {f"g{at}.{node}": self.net.widths[at] for at in self.net.reads[node]}
        for at in self.net.reads[node]:
            self.parts.setdefault(at, []).append(f"g{at}.{node}")
        if node in self.net.params:
            reads.append(f"w{node}")
            makes[f"w{node}@GRAD"] = 3
        if makes:
            self._op(reads, makes, Role.BACKWARD)

    def updates(self, *, clips: bool) -> None:
        gradients = [f"w{node}@GRAD" for node in sorted(self.net.params)]
        if clips:
            self._op(gradients, {"norm": 1}, Role.OPTIMIZE)
        for node in sorted(self.net.params):
            more = ["norm"] if clips else []
            self._op([f"w{node}", f"w{node}@GRAD", *more], {}, Role.OPTIMIZE, f"w{node}")

    def _sum(self, node: int) -> str:
        parts = self.parts.get(node, [])
        if len(parts) == 1:
            return parts[0]
        width = self.net.widths[node]
        self._op(parts or [f"h{node}"], {f"g{node}": width}, Role.BACKWARD)
        return f"g{node}"

    def _op(self, reads: Sequence[str], makes: dict[str, int], role: Role, *updates: str) -> None:
        for name, width in makes.items():
            self.inner[name] = Variable(name, "f32", (width,))
        outputs = Operands.of(*makes, *updates)
        self.ops.append(Operator("jax.cumsum", Operands.of(*reads), outputs, role=role))
