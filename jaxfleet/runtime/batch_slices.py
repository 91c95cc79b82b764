"""Steps that accumulate over slices of the batch, each shared by all devices or trainers."""

from dataclasses import replace

from jaxfleet.capture import Captured
from jaxfleet.capture.trace import BATCH_LETTER
from jaxfleet.ir.inline import specialize
from jaxfleet.passes.pipelines import may_have_slices, slicing_passes


def for_slices(captured: Captured, rows: int, sharers: int) -> Captured:
    """Returns the step for this number of rows alone, if it accumulates over slices of them.

    Each sharer then has a part of every slice, which requires a concrete number of rows.
    """
    if sharers == 1 or not may_have_slices(captured.program):
        return captured
    program = specialize(captured.program, {} if captured.rows else {BATCH_LETTER: rows})
    sliced = program
    for each in slicing_passes(program, sharers):
        sliced = each.run(sliced)
    if sliced == program:
        return captured
    signature = captured.signature.with_rows(rows)
    return replace(captured, program=program, signature=signature, rows=rows)
