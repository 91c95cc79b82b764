"""Beam search: the beams of each step, and the sentences they decode to.

::

    with loop.block():
        pre_ids, pre_scores = (layers.array_read(x, i) for x in (ids_array, scores_array))
        state = layers.sequence_expand(layers.array_read(states, i), pre_scores)
        state = layers.fc([state, layers.embedding(pre_ids, [words, 32])], 32, act="tanh")
        guessed = layers.fc(layers.lod_reset(state, pre_scores), words, act="softmax")
        best, tokens = layers.topk(guessed, 4)
        total = layers.elementwise_add(layers.log(best), layers.reshape(pre_scores, [-1]), axis=0)
        ids, scores = layers.beam_search(pre_ids, pre_scores, tokens, total, 4, end_id=1)

`jaxfleet.fluid.framework.nested_sequences` describes the representation of beams.
"""

from typing import Any

from jaxfleet.fluid.argument_checks import mistake
from jaxfleet.fluid.framework.nested_sequences import declare_levels, levels_for
from jaxfleet.fluid.framework.sequence_lengths import join_rows
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.layer_function import variables
from jaxfleet.fluid.layers.tensor_arrays import length_of, written_array


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
