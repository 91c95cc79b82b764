"""Time of the passes over large programs, with the verifier on.

    python benchmarks/pipeline.py

The programs are written by hand in the shape of a training step on one device: the layers forward
and backward, and a momentum update for each parameter, in place; the passes add an all-reduce to
each gradient. The bars:
under 0.3 s for 1,000 operators and under 3 s for 10,000, so that passes never dominate the
compilation of a step; and ten times the operators take at most twice ten times as long.
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

from common import Bar, print_bars, print_table

import jaxfleet.passes  # noqa: F401  # registers them
from jaxfleet.analysis.step_checks import meaning_rules
from jaxfleet.ir import (
    Attrs,
    Block,
    Kind,
    Literal,
    Operands,
    Operator,
    Program,
    Role,
    Variable,
    letter,
)
from jaxfleet.pipeline import Stage, parse_pipeline, run_pipeline

PIPELINE = "dce,grad_allreduce{devices=4},fuse_allreduce,donate"
SIZES = {1_000: 0.3, 10_000: 3.0}  # operators, and the seconds they may take
ROUNDS = 7
WIDTH = 64
HALF = Literal("0.5", "f32")


def training_step(operators: int) -> Program:
    """Returns a step of about this many operators: 9 for each layer, and 3."""
    layers = (operators - 3) // 9
    params = [Variable(f"w{i}", "f32", (WIDTH, WIDTH), Kind.PARAM) for i in range(layers)]
    moments = [Variable(f"m{i}", "f32", (WIDTH, WIDTH), Kind.STATE) for i in range(layers)]
    data = Variable("x", "f32", (letter("b"), WIDTH), Kind.DATA)
    ops = [*forward(layers), *backward(layers), *optimize(layers)]
    written = dict.fromkeys(name for op in ops for name in op.writes)
    outer = {v.name: v for v in (data, *params, *moments)}
    rows = replace(data, kind=Kind.TEMP)
    square = replace(rows, shape=(WIDTH, WIDTH))
    temps = {
        name: replace(square if name.startswith("w") else rows, name=name)
        for name in written
        if name not in outer
    }
    block = Block(variables=temps, ops=tuple(ops))
    return Program("step", outer, (block,), Attrs({"batch": letter("b")}))


def forward(layers: int) -> Iterator[Operator]:
    yield op("jax.copy", ["x"], ["h0"], Role.FORWARD)
    for i in range(layers):
        yield dot([f"h{i}", f"w{i}"], f"z{i}", Role.FORWARD, (1, 0))
        yield op("jax.tanh", [f"z{i}"], [f"h{i + 1}"], Role.FORWARD)
        yield op("jax.neg", [f"z{i}"], [f"dead{i}"], Role.FORWARD)
    yield op("fetch", [f"h{layers}"], [], Role.FORWARD_LOSS)


def backward(layers: int) -> Iterator[Operator]:
    yield op("jax.neg", [f"h{layers}"], [f"h{layers}@GRAD"], Role.BACKWARD_LOSS)
    for i in reversed(range(layers)):
        grad, back = f"w{i}@GRAD", f"z{i}@GRAD"
        yield op("jax.mul", [f"h{i + 1}@GRAD", f"h{i + 1}"], [back], Role.BACKWARD)
        gradient = dot([f"h{i}", back], grad, Role.BACKWARD, (0, 0))
        yield replace(gradient, role_var=((f"w{i}", grad),))
        yield dot([back, f"w{i}"], f"h{i}@GRAD", Role.BACKWARD, (1, 1))


def optimize(layers: int) -> Iterator[Operator]:
    for i in range(layers):
        yield op("jax.mul", [f"m{i}", HALF], [f"m{i}"], Role.OPTIMIZE)
        yield op("jax.add", [f"m{i}", f"w{i}@GRAD"], [f"m{i}"], Role.OPTIMIZE)
        yield op("jax.sub", [f"w{i}", f"m{i}"], [f"w{i}"], Role.OPTIMIZE)


def dot(reads: list[str | Literal], write: str, role: Role, axes: tuple[int, int]) -> Operator:
    """Returns a product that contracts one axis of each operand."""
    numbers = (((axes[0],), (axes[1],)), ((), ()))
    product = op("jax.dot_general", reads, [write], role)
    return replace(product, attrs=Attrs({"dimension_numbers": numbers}))


def op(op_type: str, reads: list[str | Literal], writes: list[str], role: Role) -> Operator:
    return Operator(op_type, Operands.of(*reads), Operands.of(*writes), role=role)


def measure(program: Program) -> tuple[float, list[Stage]]:
    """Returns the median seconds of a pipeline, and the stages of the last run."""
    seconds = []
    stages: list[Stage] = []
    for _ in range(ROUNDS):
        stages.clear()
        started = time.perf_counter()
        run_pipeline(
            program, parse_pipeline(PIPELINE), instruments=[stages.append], rules=meaning_rules
        )
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds), stages


def main() -> None:
    measure(training_step(100))  # the first use of an operator type imports its definition
    bars, took, rows = [], {}, []
    for size, bar in SIZES.items():
        program = training_step(size)
        took[size], stages = measure(program)
        for stage in stages:
            counts = [f"{stage.before.op_count:,}", f"{stage.after.op_count:,}"]
            times = [f"{1e3 * s:.1f}" for s in (stage.seconds, stage.verify_seconds)]
            rows.append([stage.name, *counts, *times])
        rows.append(["all", f"{program.op_count:,}", "", f"{1e3 * took[size]:.1f}", ""])
        bars.append(Bar(f"passes over {size:,} operators, s", took[size], bar))
    small, large = SIZES
    growth = took[large] / took[small] / (large / small)
    bars.append(Bar(f"growth from {small:,} to {large:,} operators over linear", growth, 2.0))
    print_table(["pass", "operators", "after", "ms", "verify ms"], rows)
    print_bars("pipeline", bars)


if __name__ == "__main__":
    main()
