"""Steps that accumulate over slices of the batch, each shared by all devices or trainers."""

from dataclasses import replace

from jaxfleet.capture import Captured
from jaxfleet.capture.trace import BATCH_LETTER
from jaxfleet.ir import Program
from jaxfleet.ir.inline import specialize
from jaxfleet.passes import InterleaveSlices, ScanSlices, StrideSlices
from jaxfleet.passes.collective.scan_slices import counts_out_slices
from jaxfleet.passes.collective.slice_analysis import may_slice_batch
from jaxfleet.passes.collective.slice_division import goes_over_slices
from jaxfleet.pipeline import Pass


def may_have_slices(program: Program) -> bool:
    """Whether a step may go over slices of the batch, in a loop or unrolled."""
    in_loops = goes_over_slices(program) or counts_out_slices(program)
    return in_loops or may_slice_batch(program)


def slicing_passes(program: Program, sharers: int) -> tuple[Pass, ...]:
    """Returns the passes that give every sharer a part of each slice of the batch.

    There are none if the batch size is symbolic.
    """
    if not isinstance(program.attrs.get("batch"), int) or not may_have_slices(program):
        return ()
    return ScanSlices(), InterleaveSlices(devices=sharers), StrideSlices(devices=sharers)


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
