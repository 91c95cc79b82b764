"""What a sub-block reads and writes of the blocks around it."""

from collections.abc import Iterator

from jaxfleet.fluid.block import Block


def crossing(inner: Block) -> tuple[list[str], list[str]]:
    """Returns what a block reads and writes of those around it.

    What it writes it also reads, where that has a value before: it stays where the block does not
    run, or begins the first turn of a loop.
    """
    read, written = {}, {}
    for op in inner.ops:
        read.update(dict.fromkeys(n for n in op.input_arg_names if not inner.has_var(n)))
        written.update(dict.fromkeys(n for n in op.output_arg_names if not inner.has_var(n)))
    begun = [n for n in written if n not in read and has_value(inner, n)]
    kept = [n for n in read if n not in written or has_value(inner, n)]
    return [*kept, *begun], list(written)


def has_value(inner: Block, name: str) -> bool:
    """Whether a variable around a block has a value when the block begins."""
    declared = inner._find_var_recursive(name)
    if declared is None or declared.is_data or declared.persistable:
        return True
    return any(name in op.output_arg_names for block in _around(inner) for op in block.ops)


def _around(block: Block) -> Iterator[Block]:
    while block.parent_idx >= 0:
        block = block.program.block(block.parent_idx)
        yield block
