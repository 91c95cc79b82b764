"""What a server does to a gradient that comes late: DC-ASGD, in a captured step's operators.

`g + c * g * g * (w - w')`, where `w'` is what the sender received last of the parameter `w` (Zheng
et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", 2017; fluid's `c` is 1).
"""

from collections.abc import Sequence
from dataclasses import replace

from jaxfleet.ir import Kind, Literal, Operands, Operator, Role, Variable

TRAINER_ID = "@TRAINER_ID@"  # whose gradient a block is run for
LATE = ".compensated"


def late_name(gradient: str) -> str:
    """Returns what a gradient goes by once it is corrected."""
    return f"{gradient}{LATE}"


def compensation(
    param: str, gradient: Variable, corrected: str, copies: Sequence[str], factor: float
) -> tuple[list[Operator], list[Variable]]:
    """Returns the operators that correct a gradient, and the variables that they make.

    Args:
        param: the parameter's slice.
        gradient: as a trainer sends it.
        corrected: what its correction goes by.
        copies: what each trainer received of the slice.
        factor: how much it is corrected.
    """
    kept, moved, once, twice, scaled = (
        f"{param}.{name}" for name in ("local_bak", "moved", "once", "twice", "scaled")
    )
    times: list[tuple[str, tuple[str | Literal, ...], str]] = [
        ("jax.sub", (param, kept), moved),
        ("jax.mul", (moved, gradient.name), once),
        ("jax.mul", (once, gradient.name), twice),
    ]
    if factor != 1.0:
        by = Literal.of(factor, gradient.dtype)
        times.append(("jax.mul", (twice, by), scaled))
    times.append(("jax.add", (gradient.name, times[-1][2]), corrected))
    backup = Operands.named(TrainerId=(TRAINER_ID,), X=tuple(copies))
    ops = [Operator("ref_by_trainer_id", backup, Operands.named(Out=kept), role=Role.OPTIMIZE)]
    ops += [
        Operator(op_type, Operands.of(*reads), Operands.of(made), role=Role.OPTIMIZE)
        for op_type, reads, made in times
    ]
    made = [replace(gradient, name=op.writes[0], kind=Kind.TEMP) for op in ops]
    return ops, made
