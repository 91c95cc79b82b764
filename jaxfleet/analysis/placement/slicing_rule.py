"""The slicing rule of parameters: fluid's block sizes, and the parameters that must stay whole."""

from collections.abc import Sequence
from math import prod

from jaxfleet.analysis.optimizer_groups import OptimizerGroup, OptimizerGroups, RowLocality
from jaxfleet.analysis.placement.sliced_layout import slices_of
from jaxfleet.errors import PassError
from jaxfleet.ir import Program


def block_sizes(shape: Sequence[int], servers: int, min_block_size: int) -> tuple[int, ...]:
    """Returns the number of elements in each block of a parameter, by fluid's rule.

    There are as many blocks as servers, or fewer if a block would have less than `min_block_size`
    elements; both must be positive. All have the same size, a multiple of whole rows if there are
    two axes or more, except the last, which has the rest. Rounding up to whole rows can leave
    nothing for the last servers.
    """
    check_positive(servers, min_block_size)
    numel, row = prod(shape), prod(shape[1:])
    if numel == 0:
        return (0,)
    count = min(servers, max(1, numel // min_block_size))
    size = -(-numel // count)
    size += -size % row
    return tuple(min(size, numel - start) for start in range(0, numel, size))


def check_positive(servers: int, min_block_size: int) -> None:
    """Raises a PassError if an option of the rule is not positive."""
    for name, value in (("servers", servers), ("min_block_size", min_block_size)):
        if value < 1:
            raise PassError(f"{name} is {value}, but must be at least 1")


def slice_rows(shape: Sequence[int], servers: int, min_block_size: int) -> tuple[int, ...]:
    """Returns the number of rows in each block, by fluid's rule; none for a scalar."""
    sizes, row = block_sizes(shape, servers, min_block_size), prod(shape[1:])
    if not shape:
        return ()
    return tuple(size // row for size in sizes) if prod(shape) else (shape[0],)


def exact_rows(shape: Sequence[int], servers: int, min_block_size: int) -> tuple[int, ...]:
    """Returns the number of rows in each block, by fluid's rule with at least two elements each.

    XLA divides a single number differently from many by the same one (it multiplies by the
    reciprocal), so a block of one element could differ in the last digit from the same element
    beside others. A remainder of one element goes to the block before it.
    """
    check_positive(servers, min_block_size)
    rows = slice_rows(shape, servers, max(min_block_size, 2))
    if len(rows) > 1 and rows[-1] * prod(shape[1:]) == 1:
        return (*rows[:-2], rows[-2] + 1)
    return rows


def slicing_obstacle(group: OptimizerGroup) -> str | None:
    """Returns why a parameter must stay whole whatever its size, with the user's line, or None.

    A parameter that two optimizers update has a gradient from each: both are cut where it is.
    """
    if group.rows is not RowLocality.LOCAL:
        return group.reason.headline if group.reason is not None else f"it is {group.rows.value}"
    for name in group.gradients:
        gradient = group.program.variables[name]
        if gradient.shape != group.param.shape:
            return f"its gradient '{gradient}' has another shape than its own, {group.param.type}"
    return None


_ONE_BLOCK = "fits one block (min_block_size, slice_var, number of servers)"


def reasons_for_whole(program: Program, groups: OptimizerGroups) -> dict[str, str]:
    """Returns, by parameter, why `slice_var` did not cut it: a sentence with the user's line."""
    found: dict[str, str] = {}
    for part in slices_of(program):
        if part.is_whole:
            why = slicing_obstacle(groups.group(part.param))
            found[part.param] = why or _ONE_BLOCK
    return found
