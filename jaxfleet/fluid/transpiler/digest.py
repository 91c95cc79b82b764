"""What tells the programs of one job from those of another: trainers and servers compare it."""

import hashlib
from dataclasses import replace

from jaxfleet.ir import Attrs, Operator, Program, canonical, print_program

DIGEST = "digest"
_OWN = frozenset(
    {
        *("seed", "op_namescope"),  # trainers may drop out other elements; names of scopes are free
        *("reads", "writes", "step_inputs", "ex_states", "states", "step_outputs"),  # temporaries
        *("forward_callable_id", "backward_callable_id", "names", "skipped"),  # of this process
        *("variable", "number", "draws_as"),
    }
)


def with_digest(step: Program) -> Program:
    """Returns a step that says what it is, in all programs that are made of it.

    Temporaries' names, seeds and scopes make no difference: processes train together that differ
    there alone.
    """
    blocks = [block.with_ops(map(_bare, block.ops)) for block in step.blocks]
    text = print_program(canonical(step.with_blocks(blocks)))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return replace(step, attrs=step.attrs.updated(**{DIGEST: digest}))


def _bare(op: Operator) -> Operator:
    kept = {name: value for name, value in op.attrs.items() if name not in _OWN}
    return replace(op, attrs=Attrs(kept)) if len(kept) < len(op.attrs) else op
