"""Drawn programs for tests of reports: a deep step with any number of layers, and its passes."""

from dataclasses import replace
from pathlib import Path

from jaxfleet.ir import (
    Attrs,
    Block,
    Frame,
    Kind,
    Operands,
    Operator,
    Program,
    Role,
    Source,
    Variable,
)
from jaxfleet.ir.dims import letter
from jaxfleet.passes import (
    DeadCodeElimination,
    Dispatch,
    GradAllreduce,
    InsertSendRecv,
    MergeSends,
    SliceVar,
)
from jaxfleet.pipeline import Record, run_pipeline
from jaxfleet.report import History, of_record

OPS_PER_LAYER = 14
WIDTH = 256
_ROWS = letter("b")
_PRODUCT = {"dimension_numbers": (((1,), (0,)), ((), ()))}
_SIDES = {"left": (((1,), (1,)), ((), ())), "right": (((0,), (0,)), ((), ()))}


def deep_step(layers: int, *, name: str = "deep") -> Program:
    """Returns a step of `layers` dense layers with ReLU, trained with momentum."""
    return _Draft(layers, name).program()


def deep_history(layers: int, *, servers: int = 0) -> History:
    """Returns the history of a deep step over four devices, or over two trainers with servers."""
    passes = [DeadCodeElimination(), GradAllreduce(devices=2 if servers else 4)]
    if servers:
        slicing = SliceVar(servers=servers, min_block_size=1024)
        passes += [slicing, Dispatch(servers=servers), InsertSendRecv(trainers=2), MergeSends()]
    record = Record()
    run_pipeline(deep_step(layers), passes, instruments=[record])
    return History("deep", of_record(record), rows=128, sources=_lines(layers))


def without_scopes(program: Program) -> Program:
    """Returns a program as jax traces one without Flax linen: it names no modules."""
    ops = [replace(op, source=replace(op.source, scope="")) for op in program.root.ops]
    return program.with_block(program.root.with_ops(ops))


def with_calls(program: Program) -> Program:
    """Returns a program whose operators come from calls: a step calls a loss, which calls layers.

    The first layers are called on one line, and the others on another.
    """
    step, loss = Frame("app/train.py", 9, "step"), Frame("app/train.py", 4, "build.<locals>.loss")
    again = loss._replace(line=5)
    ops = []
    for place, op in enumerate(program.root.ops):
        callers = (step, loss if place < 4 else again)
        ops.append(replace(op, source=replace(op.source, callers=callers, function="layer")))
    return program.with_block(program.root.with_ops(ops))


def server_histories(layers: int, servers: int) -> list[History]:
    """Returns the histories of the servers of `deep_history`."""
    slicing = SliceVar(servers=servers, min_block_size=1024)
    placing = [GradAllreduce(devices=2), slicing, Dispatch(servers=servers)]
    placed = run_pipeline(deep_step(layers), placing)
    found = []
    for server in range(servers):
        record = Record()
        run_pipeline(placed, [InsertSendRecv(trainers=2, server=server)], instruments=[record])
        found.append(History(f"server {server}", of_record(record), rows=128))
    return found


def _lines(layers: int) -> dict[str, dict[int, str]]:
    return {"app/model.py": {n: f"    x = layer_{n}(x)  # {n}" for n in range(1, 3 * layers + 9)}}


class _Draft:
    def __init__(self, layers: int, name: str) -> None:
        self.layers, self.name = layers, name
        self.given: dict[str, Variable] = {}
        self.made: dict[str, Variable] = {}
        self.ops: list[Operator] = []

    def program(self) -> Program:
        self._give("batch/x", (_ROWS, WIDTH), Kind.DATA)
        for n in range(self.layers):
            self._give(f"params/Dense_{n}/kernel", (WIDTH, WIDTH), Kind.PARAM)
            self._give(f"params/Dense_{n}/bias", (WIDTH,), Kind.PARAM)
            self._give(f"opt_state/trace/Dense_{n}/kernel", (WIDTH, WIDTH), Kind.STATE)
            self._give(f"opt_state/trace/Dense_{n}/bias", (WIDTH,), Kind.STATE)
        x = "batch/x"
        for n in range(self.layers):
            x = self._forward(n, x)
        self._op("metrics/loss", "jax.reduce_sum", [x], (), 0, Role.FORWARD_LOSS,
                 attrs={"axes": (0, 1)})  # fmt: skip
        grad = x
        for n in reversed(range(self.layers)):
            grad = self._backward(n, grad)
        for n in range(self.layers):
            self._update(n, "kernel", (WIDTH, WIDTH))
            self._update(n, "bias", (WIDTH,))
        self.ops.append(Operator("fetch", Operands.of("metrics/loss"), role=Role.OPTIMIZE))
        block = Block(variables=self.made, ops=tuple(self.ops))
        return Program(self.name, self.given, (block,), Attrs({"batch": _ROWS}))

    def _give(self, name: str, shape: tuple[object, ...], kind: Kind) -> None:
        self.given[name] = Variable(name, "f32", shape, kind)  # type: ignore[arg-type]

    def _op(  # noqa: PLR0917  # one line an operator
        self, out: str, type_: str, inputs: list[str], shape: tuple[object, ...], n: int,
        role: Role = Role.FORWARD, pair: tuple[tuple[str, str], ...] = (), attrs: object = None,
    ) -> str:  # fmt: skip
        if out not in self.given:
            self.made[out] = Variable(out, "f32", shape)  # type: ignore[arg-type]
        source = Source("app/model.py", 3 * n + len(inputs), "train_step", f"Deep/Dense_{n}")
        op = Operator(type_, inputs, [out], attrs or {}, role, pair, source)  # type: ignore[arg-type]
        self.ops.append(op)
        return out

    def _forward(self, n: int, x: str) -> str:
        wide, w, b = (_ROWS, WIDTH), f"params/Dense_{n}/kernel", f"params/Dense_{n}/bias"
        y = self._op(f"Dense_{n}.product", "jax.dot_general", [x, w], wide, n, attrs=_PRODUCT)
        shape = {"broadcast_dimensions": (1,), "shape": wide}
        bias = self._op(f"Dense_{n}.bias", "jax.broadcast_in_dim", [b], wide, n, attrs=shape)
        z = self._op(f"Dense_{n}.sum", "jax.add", [y, bias], wide, n)
        return self._op(f"Dense_{n}.out", "jax.tanh", [z], wide, n)

    def _backward(self, n: int, grad: str) -> str:
        wide, role = (_ROWS, WIDTH), Role.BACKWARD
        w, b = f"params/Dense_{n}/kernel", f"params/Dense_{n}/bias"
        x = f"Dense_{n - 1}.out" if n else "batch/x"
        g = self._op(f"Dense_{n}.g", "jax.mul", [grad, f"Dense_{n}.out"], wide, n, role)
        side, other = (
            {"dimension_numbers": _SIDES["right"]},
            {"dimension_numbers": _SIDES["left"]},
        )
        of_w, of_b = ((w, f"{w}@GRAD"),), ((b, f"{b}@GRAD"),)
        shape = (WIDTH, WIDTH)
        self._op(f"{w}@GRAD", "jax.dot_general", [x, g], shape, n, role, of_w, side)
        self._op(f"{b}@GRAD", "jax.reduce_sum", [g], (WIDTH,), n, role, of_b, {"axes": (0,)})
        return self._op(f"Dense_{n}.back", "jax.dot_general", [g, w], wide, n, role, attrs=other)

    def _update(self, n: int, which: str, shape: tuple[int, ...]) -> None:
        p, t = f"params/Dense_{n}/{which}", f"opt_state/trace/Dense_{n}/{which}"
        role, pair = Role.OPTIMIZE, ((p, f"{p}@GRAD"),)
        moved = self._op(f"mul.{n}.{which}", "jax.mul", [t, t], shape, n, role)
        self._op(t, "jax.add", [moved, f"{p}@GRAD"], shape, n, role, pair)
        self._op(p, "jax.sub", [p, t], shape, n, role, pair)


def write_dump(folder: Path, layers: int = 2) -> None:
    """Dumps a deep step over four devices."""
    from jaxfleet.pipeline import Dump  # noqa: PLC0415  # used by few

    passes = [DeadCodeElimination(), GradAllreduce(devices=4)]
    run_pipeline(deep_step(layers), passes, instruments=[Dump(folder)])
