"""Arrays of tensors: layers that write, read and count.

An array's elements have one shape, and there is room for as many as are written: a constant index
says so, or the loop in which a counter is the index (`room_in_loop`).
"""

from typing import Any

from jaxfleet.fluid.block import Block
from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.dtypes import VarType, dtype_name
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.one_operator import variables
from jaxfleet.fluid.operator import Operator
from jaxfleet.fluid.program import Program
from jaxfleet.fluid.trip_counts import constant_before, largest_index
from jaxfleet.fluid.variable import Variable

_LENGTH = "@SIZE"


def create_array(dtype: Any) -> Variable:
    """Makes an array of tensors, of which there is none yet.

    Args:
        dtype: of their elements.
    """
    helper, name = LayerHelper("array"), dtype_name(dtype)
    array = helper.block.create_var(
        name=f"{helper.name}.out", dtype=name, type=VarType.LOD_TENSOR_ARRAY
    )
    length = helper.block.create_var(name=array.name + _LENGTH, dtype="int32", stop_gradient=True)
    length.sizes = (1,)
    helper.block._insert_op_without_sync(
        len(helper.block.ops),
        "new_array",
        outputs={"Out": array.name, "Length": length.name},
        attrs={"capacity": 0, "shape": [], "dtype": name},
    )
    return array


def array_write(x: Variable, i: Variable, array: Variable | None = None) -> Variable:
    """Writes a tensor into an array, at an index; returns the array.

    Args:
        x: the tensor; all of an array have its shape.
        i: `[1]`, of whole numbers.
        array: a new one unless given.

    Raises:
        ProgramError: the array holds tensors of another shape, or its room is not known.
    """
    (given,), (index,) = variables("array_write", "x", x), variables("array_write", "i", i)
    to = create_array(given.dtype) if array is None else _array("array_write", array)
    if to.sizes is None:
        assert given.sizes is not None
        to.sizes = (0, *given.sizes)
        _maker(to)._set_attr("shape", list(given.sizes))
    elif to.sizes[1:] != given.sizes:
        held, shape = list(to.sizes[1:]), list(given.sizes or ())
        raise mistake(f"array_write: '{to.name}' holds tensors {held}, and '{x.name}' is {shape}")
    helper, length = LayerHelper("array_write"), to.name + _LENGTH
    inputs: dict[str, str | Variable] = {"X": given, "I": index, "Array": to, "Length": length}
    op = helper.append_op("write_to_array", inputs, {"Out": to, "LengthOut": length})
    if not _is_in_loop(helper.block):
        _grow(to, constant_before(op.block, index.name, op), index)
    return to


def array_read(array: Variable, i: Variable) -> Variable:
    """Reads the tensor at an index of an array.

    Raises:
        ProgramError: it is not an array, or nothing was written to it.
    """
    of, helper = _array("array_read", array), LayerHelper("array_read")
    if of.sizes is None:
        raise mistake(f"array_read: nothing is written to '{of.name}'", "array_write comes first")
    made = helper.output(of.dtype)
    made.sizes = of.sizes[1:]
    helper.append_op("read_from_array", {"X": of, "I": i}, {"Out": made})
    return made


def array_length(array: Variable) -> Variable:
    """Counts the tensors of an array: i64[1].

    Raises:
        ProgramError: it is not an array.
    """
    of, helper = _array("array_length", array), LayerHelper("array_length")
    made = helper.output("int64", stop_gradient=True)
    made.sizes = (1,)
    inputs: dict[str, str | Variable] = {"X": of, "Length": of.name + _LENGTH}
    helper.append_op("lod_array_length", inputs, {"Out": made})
    return made


def room_in_loop(loop: Operator) -> None:
    """Gives arrays the room for what a loop writes.

    Args:
        loop: a `while`, or the operator of an RNN's steps, which is in no other loop.

    Raises:
        ProgramError: how much it writes is not known.
    """
    for write, around in _writes(loop, ()):
        name = write.input("I")[0]
        found: list[float | None] = [largest_index(each, write, name) for each in around]
        if not around:
            found = [constant_before(write.block, name, write)]
        known = [number for number in found if number is not None]
        array = write.block._var_recursive(write.output("Out")[0])
        _grow(array, max(known) if known else None, write.block._var_recursive(name))


def _writes(
    op: Operator, around: tuple[Operator, ...]
) -> list[tuple[Operator, tuple[Operator, ...]]]:
    """Returns what writes to arrays within an operator, with the loops that each is in."""
    if op.type == "write_to_array":
        return [(op, around)]
    loops = (*around, op) if op.type == "while" else around
    return [one for block in op._inner_blocks() for x in block.ops for one in _writes(x, loops)]


def _is_in_loop(block: Block) -> bool:
    return bool(block.program._open_loops)


def _grow(array: Variable, index: float | None, by: Variable) -> None:
    """Gives an array room for a tensor at an index."""
    if index is None:
        what = f"array_write: how large '{by.name}' may become is not known, and so the room that"
        hint = "count from fill_constant in steps, while less_than(i, fill_constant(...)) holds"
        raise mistake(f"{what} '{array.name}' needs", hint)
    assert array.sizes is not None
    maker, room = _maker(array), int(index) + 1
    if room > maker.attrs["capacity"]:
        maker._set_attr("capacity", room)
        array.sizes = (room, *array.sizes[1:])


def _array(layer: str, array: Any) -> Variable:
    (given,) = variables(layer, "array", array)
    if given.type != VarType.LOD_TENSOR_ARRAY:
        raise mistake(f"{layer}: '{given.name}' is not an array of tensors", "layers.create_array")
    return given


def _maker(array: Variable) -> Operator:
    program: Program = array.block.program
    ops = (op for block in program.blocks for op in block.ops if op.type == "new_array")
    return next(op for op in ops if op.output("Out") == [array.name])
