"""Tensor arrays, and the beam search whose beams they hold.

The elements of an array have one shape. Its capacity is derived from the indices: a constant index,
or the trip count of the loop whose counter is the index (`room_in_loop`). Beams, which change from
step to step, have the largest possible number of rows; the array stores their levels beside them,
as `jaxfleet.fluid.framework.nested_sequences` describes. A loop that searches::

    with loop.block():
        pre_ids, pre_scores = (layers.array_read(x, i) for x in (ids_array, scores_array))
        state = layers.sequence_expand(layers.array_read(states, i), pre_scores)
        state = layers.fc([state, layers.embedding(pre_ids, [words, 32])], 32, act="tanh")
        guessed = layers.fc(layers.lod_reset(state, pre_scores), words, act="softmax")
        best, tokens = layers.topk(guessed, 4)
        total = layers.elementwise_add(layers.log(best), layers.reshape(pre_scores, [-1]), axis=0)
        ids, scores = layers.beam_search(pre_ids, pre_scores, tokens, total, 4, end_id=1)
"""

from typing import Any

from jaxfleet.fluid.argument_checks import mistake
from jaxfleet.fluid.framework.nested_sequences import (
    declare_levels,
    has_levels,
    levels_for,
    levels_name,
)
from jaxfleet.fluid.framework.operator import Operator
from jaxfleet.fluid.framework.program import Program
from jaxfleet.fluid.framework.sequence_lengths import join_rows
from jaxfleet.fluid.framework.sub_blocks import constant_before, max_index
from jaxfleet.fluid.framework.types import VarType, dtype_name
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.layer_function import variables
from jaxfleet.ir import Size

_LENGTH = "@SIZE"


def create_array(dtype: Any) -> Variable:
    """Creates an empty array of tensors of a dtype."""
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
    """Writes a tensor into an array at an index; returns the array.

    Args:
        x: the tensor; all tensors of an array have one shape.
        i: the index, `[1]`, of integers.
        array: a new one unless given.

    Raises:
        ProgramError: the array's tensors have another shape, or its capacity is unknown.
    """
    (given,), (index,) = variables("array_write", "x", x), variables("array_write", "i", i)
    to = create_array(given.dtype) if array is None else _array("array_write", array)
    levels = levels_for(given)
    if to.sizes is None:
        _begin(to, given, levels)
    _check_shape(to, given, levels)
    helper, length = LayerHelper("array_write"), length_of(to)
    inputs: dict[str, str | Variable] = {"X": given, "I": index, "Array": to, "Length": length}
    outputs: dict[str, str | Variable] = {"Out": to, "LengthOut": length}
    if has_levels(to):
        assert levels is not None
        inputs |= {"XLevels": levels, "ArrayLevels": levels_name(to.name)}
        outputs["OutLevels"] = levels_name(to.name)
    op = helper.append_op("write_to_array", inputs, outputs)
    if not helper.block.program._open_loops:
        _grow(to, constant_before(op.block, index.name, op), index)
    return to


def _begin(array: Variable, first: Variable, levels: Variable | None) -> None:
    """Sets an array's shape from its first tensor, and allocates space for its levels."""
    assert first.sizes is not None
    array.sizes = (0, *first.sizes)
    maker = _maker(array)
    maker._set_attr("shape", list(first.sizes))
    if levels is not None:
        assert levels.sizes
        declare_levels(array, (0, *levels.sizes))
        maker._set_attr("levels", levels.sizes[0])
        maker.outputs["OutLevels"] = [levels_name(array.name)]


def _check_shape(array: Variable, given: Variable, levels: Variable | None) -> None:
    """Checks that an array accepts a tensor, and widens the array for beams.

    Raises:
        ProgramError: the shapes differ, or only one of the two has levels.
    """
    assert array.sizes is not None
    held, more = array.sizes[1:], given.sizes or ()
    if held == more and (levels is not None or not has_levels(array)):
        return
    if held == more:
        what = f"array_write: '{array.name}' holds beams, and '{given.name}' has no levels"
        raise mistake(what, "give it those of others: lod_reset(x, y)")
    if levels is None or has_levels(array) or held[1:] != more[1:]:
        shapes = f"holds tensors {list(held)}, and '{given.name}' is {list(more)}"
        raise mistake(f"array_write: '{array.name}' {shapes}")
    _widen(array, more)


def _widen(array: Variable, shape: tuple[Size, ...]) -> None:
    """Widens the tensors of an array to the rows of beams, if the first had one per source.

    Raises:
        ProgramError: an operator has already used the smaller shape.
    """
    assert array.sizes is not None
    ops = [op for block in array.block.program.blocks for op in block.ops]
    for op in ops:
        if op.type == "write_to_array" and op.output("Out") == [array.name]:
            own = op.block._var_recursive(op.input("X")[0])
            op._set_attr("rows", (own.sizes or ())[0])
        if op.type != "read_from_array" or op.input("X") != [array.name]:
            continue
        made = op.block._var_recursive(op.output("Out")[0])
        for user in ops:
            is_expanded = user.type == "sequence_expand" and user.input("Y") != [made.name]
            if made.name in user.input_arg_names and not is_expanded:
                what = f"array_write: '{array.name}' is to hold beams, and {user.type} takes "
                hint = "begin the array with sequence_expand(x, y), y being the first beams"
                raise mistake(f"{what}'{made.name}' of it for as many rows as the first had", hint)
        made.sizes = shape
    array.sizes = (array.sizes[0], *shape)
    _maker(array)._set_attr("shape", list(shape))


def array_read(array: Variable, i: Variable) -> Variable:
    """Reads the tensor at an index of a written array."""
    of, helper = _array("array_read", array), LayerHelper("array_read")
    if of.sizes is None:
        raise mistake(f"array_read: nothing is written to '{of.name}'", "array_write comes first")
    made = helper.output(of.dtype)
    made.sizes = of.sizes[1:]
    inputs: dict[str, str | Variable] = {"X": of, "I": i}
    outputs = {"Out": made}
    if has_levels(of):
        beside = of.block.vars[levels_name(of.name)]
        assert beside.sizes is not None
        inputs["XLevels"] = beside
        outputs["OutLevels"] = declare_levels(made, beside.sizes[1:])
        made.lod_level = 2
    helper.append_op("read_from_array", inputs, outputs)
    return made


def array_length(array: Variable) -> Variable:
    """Number of tensors of an array: i64[1]."""
    of, helper = _array("array_length", array), LayerHelper("array_length")
    made = helper.output("int64", stop_gradient=True)
    made.sizes = (1,)
    inputs: dict[str, str | Variable] = {"X": of, "Length": length_of(of)}
    helper.append_op("lod_array_length", inputs, {"Out": made})
    return made


def length_of(array: Variable) -> str:
    """Name of the variable that counts an array's tensors."""
    return array.name + _LENGTH


def written_array(layer: str, array: Any) -> Variable:
    """The array, whose capacity must be known: written, and not by a loop that is still open."""
    of = _array(layer, array)
    if of.sizes is None or of.sizes[0] == 0:
        what = f"{layer}: how many tensors '{of.name}' may hold is not known"
        raise mistake(what, "call it behind the loop that writes them")
    return of


def room_in_loop(loop: Operator) -> None:
    """Sets the capacity of arrays from a loop's writes.

    Args:
        loop: a `while`, or the operator of an RNN's steps, outside any other loop.

    Raises:
        ProgramError: the number of writes is unknown.
    """
    for write, around in _writes(loop, ()):
        name = write.input("I")[0]
        found: list[float | None] = [max_index(each, write, name) for each in around]
        if not around:
            found = [constant_before(write.block, name, write)]
        known = [number for number in found if number is not None]
        array = write.block._var_recursive(write.output("Out")[0])
        _grow(array, max(known) if known else None, write.block._var_recursive(name))


def _writes(
    op: Operator, around: tuple[Operator, ...]
) -> list[tuple[Operator, tuple[Operator, ...]]]:
    """Operators that write to arrays within `op`, with the loops around each."""
    if op.type == "write_to_array":
        return [(op, around)]
    loops = (*around, op) if op.type == "while" else around
    return [one for block in op._inner_blocks() for x in block.ops for one in _writes(x, loops)]


def _grow(array: Variable, index: float | None, by: Variable) -> None:
    """Grows an array's capacity for a tensor at an index."""
    if index is None:
        what = f"array_write: how large '{by.name}' may become is not known, and so the room that"
        hint = "count from fill_constant in steps, while less_than(i, fill_constant(...)) holds"
        raise mistake(f"{what} '{array.name}' needs", hint)
    assert array.sizes is not None
    maker, room = _maker(array), int(index) + 1
    if room > maker.attrs["capacity"]:
        maker._set_attr("capacity", room)
        array.sizes = (room, *array.sizes[1:])
        if has_levels(array):
            beside = array.block.vars[levels_name(array.name)]
            beside.sizes = (room, *(beside.sizes or ())[1:])


def _array(layer: str, array: Any) -> Variable:
    (given,) = variables(layer, "array", array)
    if given.type != VarType.LOD_TENSOR_ARRAY:
        raise mistake(f"{layer}: '{given.name}' is not an array of tensors", "layers.create_array")
    return given


def _maker(array: Variable) -> Operator:
    program: Program = array.block.program
    ops = (op for block in program.blocks for op in block.ops if op.type == "new_array")
    return next(op for op in ops if op.output("Out") == [array.name])


def beam_search(
    pre_ids: Variable,
    pre_scores: Variable,
    ids: Variable | None,
    scores: Variable,
    beam_size: int,
    end_id: int,
    level: int = 0,
    is_accumulated: bool = True,
    name: str | None = None,
    return_parent_idx: bool = False,
) -> Any:
    """Selects the best continuations of each source's beams, and drops sources that have ended.

    Args:
        pre_ids: i64[rows,1], last word of each beam.
        pre_scores: f32[rows,1], score of each beam so far.
        ids: i64[rows,candidates], words that may follow; None if they are the columns of `scores`.
        scores: f32[rows,candidates], of two levels: of whole beams, as sums of logarithms; or
            probabilities of the words alone.
        beam_size: beams kept per source.
        end_id: word that ends a beam.
        level: 0: beams are selected per source.
        is_accumulated: `scores` are of whole beams.
        name: of the layer.
        return_parent_idx: return also i32[rows], the row that each selected one continues.

    Returns:
        The words and their scores, `[rows,1]`, whose levels are the prefixes of each source and the
        continuations of each prefix.

    Raises:
        ProgramError: the scores do not have two levels, rows or candidates do not match, or another
            level is requested.
    """
    (tokens,) = variables("beam_search", "pre_ids", pre_ids)
    (before,) = variables("beam_search", "pre_scores", pre_scores)
    (now,) = variables("beam_search", "scores", scores)
    given = {"pre_ids": tokens, "pre_scores": before, "scores": now}
    if ids is not None:
        (given["ids"],) = variables("beam_search", "ids", ids)
        if given["ids"].shape[1:] != now.shape[1:]:
            shapes = f"{list(given['ids'].shape)}, and scores {list(now.shape)}"
            raise mistake(f"beam_search: ids are {shapes}")
    if level != 0:
        raise mistake(f"beam_search: level is {level}", "level=0 selects beams for each source")
    if beam_size < 1:
        raise mistake(f"beam_search: beam_size is 1 or more, not {beam_size}")
    join_rows(now.block.program, given.values())
    levels = levels_for(now)
    if levels is None:
        hint = "lod_reset(scores, pre_scores); what is fed first is declared with lod_level=2"
        raise mistake(f"beam_search: '{now.name}' has no two levels of sequences", hint)
    counts = {slot: v.sizes[0] for slot, v in given.items() if v.sizes}
    if odd := next((slot for slot, rows in counts.items() if rows != counts["scores"]), None):
        what = f"{odd} has {counts[odd]} rows, and scores have {counts['scores']}"
        raise mistake(f"beam_search: {what}", "all are of the beams of one step")
    helper = LayerHelper("beam_search", name)
    best = helper.output(before.dtype, stop_gradient=True)
    chosen = helper.output(tokens.dtype, stop_gradient=True)
    parent = helper.output("int32", stop_gradient=True)
    best.sizes = chosen.sizes = (counts["scores"], 1)
    best.lod_level = chosen.lod_level = 2
    parent.sizes = (counts["scores"],)
    outputs = {
        "selected_ids": chosen,
        "selected_scores": best,
        "parent_idx": parent,
        "OutLevels": declare_levels(chosen, levels.sizes or ()),
    }
    attrs = {"level": level, "beam_size": beam_size, "end_id": end_id}
    attrs["is_accumulated"] = is_accumulated
    helper.append_op("beam_search", {**given, "scoresLevels": levels}, outputs, attrs)
    return (chosen, best, parent) if return_parent_idx else (chosen, best)


def beam_search_decode(
    ids: Variable, scores: Variable, beam_size: int, end_id: int, name: str | None = None
) -> tuple[Variable, Variable]:
    """Traces the beams of all steps back to sentences, for each source the best one first.

    Args:
        ids: array of the words that `beam_search` selected, beginning with its first input.
        scores: array of their scores.
        beam_size: sentences per source.
        end_id: word that ends a sentence, kept once.
        name: of the layer.

    Returns:
        The words of all sentences, i64[words], and their scores, with two levels: the sentences of
        each source, and the words of each. They are fetched with `return_numpy=False`.

    Raises:
        ProgramError: an argument is not an array of beams, or the loop that writes it is still
            open.
    """
    words, points = (written_array("beam_search_decode", x) for x in (ids, scores))
    levels = levels_for(words)
    if levels is None or levels_for(points) is None:
        what = f"beam_search_decode: '{words.name}' and '{points.name}' are not both of beams"
        raise mistake(what, "write what beam_search returns, and first what is fed to it")
    if words.sizes != points.sizes:
        shapes = f"{list(words.sizes or ())} and {list(points.sizes or ())}"
        raise mistake(f"beam_search_decode: words and scores are {shapes}")
    assert words.sizes
    assert levels.sizes
    steps, rows = words.sizes[:2]
    helper = LayerHelper("beam_search_decode", name)
    sentences = helper.output(words.dtype, stop_gradient=True)
    totals = helper.output(points.dtype, stop_gradient=True)
    sentences.sizes = totals.sizes = (steps * rows,)
    sentences.lod_level = totals.lod_level = 2
    beside = declare_levels(sentences, (levels.sizes[1] - rows + steps * rows,))
    helper.append_op(
        "beam_search_decode",
        {"Ids": words, "Scores": points, "IdsLevels": levels, "Length": length_of(words)},
        {"SentenceIds": sentences, "SentenceScores": totals, "OutLevels": beside},
        {"beam_size": beam_size, "end_id": end_id},
    )
    return sentences, totals
