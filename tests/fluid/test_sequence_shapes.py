"""Sequences of new lengths: created, padded, unpadded, and rejected."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import FeedError, ProgramError
from jaxfleet.fluid import layers
from jaxfleet.fluid.lowering.program_cache import runnable
from jaxfleet.ir import parse
from jaxfleet.runtime import Scope
from tests.fluid.nets import fresh
from tests.fluid.parallel import Trained, devices, sgd
from tests.fluid.pserver.jobs import run_alone, run_job

ROWS = np.arange(12, dtype=np.float32).reshape(6, 2)
LENGTHS = [3, 1, 2]
CLOSE: Any = {"rtol": 2e-5, "atol": 1e-6}  # sums over devices have another order


def lod(rows: Any, lengths: list[int]) -> fluid.LoDTensor:
    return fluid.create_lod_tensor(rows, [lengths], fluid.CPUPlace())


def sliced(x: fluid.Variable, offset: list[int], length: list[int]) -> fluid.Variable:
    first, own = (layers.assign(np.asarray(n, np.int64)[:, None]) for n in (offset, length))
    return layers.sequence_slice(x, first, own)


def run(main: fluid.Program, fetched: list[Any], **feed: Any) -> list[Any]:
    return fluid.Executor().run(main, feed=feed, fetch_list=fetched, return_numpy=False)


def shown(made: Any) -> tuple[list[list[int]], list[list[float]]]:
    return made.recursive_sequence_lengths(), np.asarray(made).tolist()


def test_rows_that_were_padded_elsewhere_become_sequences() -> None:
    with fresh() as (main, _), fluid.scope_guard(Scope()):
        wide = fluid.data("wide", [None, 3, 2])
        length = fluid.data("length", [None], "int64")
        rows = layers.sequence_unpad(wide, length)
        out = layers.sequence_pool(layers.scale(rows, 2.0), "average")
        feed = {"wide": np.arange(18, dtype=np.float32).reshape(3, 3, 2)}
        made = run(main, [rows, out], **feed, length=np.array([2, 0, 3]))
    wanted = [[0, 1], [2, 3], [12, 13], [14, 15], [16, 17]]
    assert shown(made[0]) == ([[2, 0, 3]], wanted)
    np.testing.assert_allclose(np.asarray(made[1]), [[2, 4], [0, 0], [28, 30]])


def test_what_was_padded_comes_back_to_stand_beside_what_it_was() -> None:
    with fresh() as (main, _), fluid.scope_guard(Scope()):
        x = layers.data("x", [2], lod_level=1)
        wide, length = layers.sequence_pad(x, layers.assign(np.zeros(1, np.float32)))
        both = layers.elementwise_add(x, layers.sequence_unpad(layers.scale(wide, 3.0), length))
        (made,) = run(main, [both], x=lod(ROWS, LENGTHS))
    assert wide.shape == (-1, -1, 2)
    assert shown(made) == ([LENGTHS], (4 * ROWS).tolist())


def test_slices_of_slices_and_their_joins_have_lengths_of_their_own() -> None:
    with fresh() as (main, _), fluid.scope_guard(Scope()):
        x = layers.data("x", [2], lod_level=1)
        one, two = sliced(x, [1, 0, 0], [2, 1, 1]), sliced(x, [0, 0, 1], [1, 0, 1])
        within = sliced(one, [1, 0, 0], [1, 1, 0])
        joined = layers.sequence_concat([one, two])
        again = layers.sequence_reshape(joined, 1)
        with pytest.raises(ProgramError, match="cannot take"):
            layers.elementwise_add(one, two)
        fetched = [one, two, within, joined, layers.sequence_pool(again, "last")]
        made = run(main, fetched, x=lod(ROWS, LENGTHS))
    first, second, inner, both, last = made
    assert shown(first) == ([[2, 1, 1]], ROWS[[1, 2, 3, 4]].tolist())
    assert shown(second) == ([[1, 0, 1]], ROWS[[0, 5]].tolist())
    assert shown(inner) == ([[1, 1, 0]], ROWS[[2, 3]].tolist())
    assert shown(both) == ([[3, 1, 2]], ROWS[[1, 2, 0, 3, 4, 5]].tolist())
    np.testing.assert_array_equal(np.asarray(last), ROWS[[0, 3, 5], 1:])


def test_a_mean_over_joined_rows_is_over_those_that_are_fed() -> None:
    with fresh() as (main, _), fluid.scope_guard(Scope()):
        x, y = (layers.data(name, [2], lod_level=1) for name in "xy")
        out = layers.mean(layers.sequence_concat([x, y]))
        (made,) = run(main, [out], x=lod(ROWS, LENGTHS), y=lod(ROWS[:4], [1, 1, 2]))
    np.testing.assert_allclose(np.asarray(made), [(ROWS.sum() + ROWS[:4].sum()) / 20], rtol=1e-6)


def test_a_program_that_makes_sequences_is_copied_saved_printed_and_parsed() -> None:
    with fresh() as (main, _), fluid.scope_guard(Scope()):
        x = layers.data("x", [2], lod_level=1)
        zero = layers.assign(np.zeros(1, np.float32))
        part = sliced(x, [0, 0, 1], [2, 1, 1])
        out, _ = layers.sequence_pad(layers.sequence_reshape(part, 1), zero, maxlen=5)
        text = str(runnable(main))
        saved = fluid.Program.parse_from_string(main.serialize_to_string())
        feed = {"x": lod(ROWS, LENGTHS)}
        found = [run(p, [out.name], **feed)[0] for p in (main, main.clone(for_test=True), saved)]
    assert str(parse(text)) == text
    assert "sequence_slice_0.tmp_0@LENGTHS: i32[b]" in text
    wanted = np.array([[0, 1, 2, 3, 0], [6, 7, 0, 0, 0], [10, 11, 0, 0, 0]], np.float32)
    for made in found:
        np.testing.assert_array_equal(np.asarray(made)[:, :, 0], wanted)


def _pad_of_slice(x: fluid.Variable) -> Any:
    return layers.sequence_pad(sliced(x, [0] * 3, [1] * 3), layers.assign(np.zeros(1, "f4")))


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (_pad_of_slice, "how long the longest sequence of '.*' is is not known"),
        (lambda _: layers.sequence_concat([fluid.data("p", [None, 2])]), "'p' is no sequences"),
        (lambda x: layers.sequence_reshape(x, 0), "rows of one axis and a width, not"),
        (lambda x: layers.sequence_pad(x, x, maxlen=0), "maxlen is 1 or more, not 0"),
        (lambda x: layers.warpctc(x, x, blank=2), "blank is 2, and there are 2 classes"),
        (lambda x: layers.warpctc(x, x, input_length=x), "given without the other"),
        (lambda x: layers.warpctc(x, x), "'x' is float32"),
        (lambda x: layers.edit_distance(x, x, ignored_tokens=[1], input_length=x, label_length=x),
         "tokens cannot be left out of what is padded"),
    ],
)  # fmt: skip
def test_what_cannot_be_built_is_refused(build: Callable[[Any], Any], why: str) -> None:
    with fresh(), pytest.raises(ProgramError, match=why):
        build(layers.data("x", [2], lod_level=1))


def test_lengths_that_a_layer_cannot_take_are_refused_when_they_are_fed() -> None:
    with fresh() as (main, _), fluid.scope_guard(Scope()):
        x = layers.data("x", [2], lod_level=1)
        zero = layers.assign(np.zeros(1, np.float32))
        wide, _ = layers.sequence_pad(x, zero, maxlen=2)
        with pytest.raises(FeedError, match="a sequence of 3 rows, and sequence_pad pads to 2"):
            run(main, [wide], x=lod(ROWS, LENGTHS))
    with fresh() as (main, _), fluid.scope_guard(Scope()):
        x = layers.data("x", [2], lod_level=1)
        rows = layers.sequence_reshape(x, 4)
        with pytest.raises(FeedError, match="of 3 rows, and sequence_reshape makes one of each 2"):
            run(main, [rows], x=lod(ROWS, LENGTHS))


def test_rows_that_a_sequence_has_not_are_nan_and_spare_rows_are_not_averaged() -> None:
    with fresh() as (main, _), fluid.scope_guard(Scope()):
        x = layers.data("x", [2], lod_level=1)
        out = layers.sequence_pool(sliced(x, [1, 1, 0], [2, 1, 1]), "sum")
        (made,) = run(main, [out], x=lod(ROWS, LENGTHS))
        assert np.isnan(np.asarray(made)).all()
    with fresh() as (main, _), fluid.scope_guard(Scope()):
        x = layers.data("x", [2], lod_level=1)
        out = layers.mean(sliced(x, [0] * 3, [1] * 3))
        why = "mean takes all rows of '.*' together, and some of them are spare"
        with pytest.raises(ProgramError, match=why):
            run(main, [out], x=lod(ROWS, LENGTHS))


@pytest.mark.parametrize("share", [fluid.memory_optimize, fluid.release_memory])
def test_made_sequences_let_their_memory_go_as_others_do(share: Callable[[Any], Any]) -> None:
    with fresh() as (main, _), fluid.scope_guard(Scope()):
        x = layers.data("x", [2], lod_level=1)
        part = layers.scale(sliced(layers.scale(x, 2.0), [0, 0, 1], [2, 1, 1]), 3.0)
        joined = layers.sequence_concat([layers.square(part), part])
        out = layers.sequence_pool(layers.scale(joined, 0.5), "sum")
        (wanted,) = run(main, [out], x=lod(ROWS, LENGTHS))
        share(main)
        (made,) = run(main, [out], x=lod(ROWS, LENGTHS))
    np.testing.assert_array_equal(np.asarray(made), np.asarray(wanted))


WORDS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10, 11, 12, 13, 14, 15]]
TAGS = [[1, 2], [3], [2], [1, 1, 3]]
FEED: Any = {"words": WORDS, "tags": TAGS, "y": np.asarray([[0], [1], [1], [0]])}
HALVES: Any = [
    {"words": WORDS[at : at + 2], "tags": TAGS[at : at + 2], "y": FEED["y"][at : at + 2]}
    for at in (0, 2)
]


def aligned() -> tuple[fluid.Variable, fluid.Variable]:
    """Returns a loss through CTC, a join, a pad and an unpad, with the prediction."""
    words = layers.data("words", [1], dtype="int64", lod_level=1)
    tags = layers.data("tags", [1], dtype="int32", lod_level=1)
    y = layers.data("y", [1], dtype="int64")
    rows = layers.embedding(words, [20, 4], param_attr="table")
    scores = layers.fc(rows, 5, param_attr="w")
    zero = layers.assign(np.zeros(1, np.float32))
    wide, length = layers.sequence_pad(scores, zero)
    back = layers.sequence_unpad(layers.tanh(wide), length)
    own = layers.fill_constant_batch_size_like(y, [-1, 1], "int64", 1)
    first = layers.sequence_slice(scores, layers.zeros_like(own), own)
    pooled = layers.sequence_pool(layers.sequence_concat([back, first]), "sqrt")
    out = layers.fc(pooled, 2, act="softmax", param_attr="v")
    ctc = layers.warpctc(scores, tags, norm_by_times=True)
    return layers.mean(layers.elementwise_add(layers.cross_entropy(out, y), ctc)), out


@pytest.mark.grid
def test_devices_that_share_made_sequences_train_as_one() -> None:
    one, two = Trained(sgd, aligned), Trained(sgd, aligned)
    with devices(2):
        parallel = two.parallel()
    (loss,) = one.exe.run(one.main, FEED, [one.loss], scope=one.scope)
    losses, out = parallel.run([two.loss, two.out.name], FEED)
    np.testing.assert_allclose(losses.mean(), loss[0], **CLOSE)
    assert out.shape == (4, 2)
    for name, value in one.parameters().items():
        np.testing.assert_allclose(two.parameters()[name], value, err_msg=name, **CLOSE)


@pytest.mark.grid
def test_trainers_with_servers_train_on_made_sequences_as_one_process() -> None:
    def net() -> fluid.Variable:
        loss, _ = aligned()
        fluid.optimizer.SGD(0.1).minimize(loss)
        return loss

    job = run_job(net, [[half] * 2 for half in HALVES])
    alone = run_alone(net, [FEED] * 2)
    np.testing.assert_allclose(np.mean(job.losses, 0), alone.losses[0], **CLOSE)
