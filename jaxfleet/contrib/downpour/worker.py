"""A worker's batch: look up rows, run the program, push gradients.

::

    ids -> each key once -> rows -> the program -> gradients of rows -> sums by key -> servers
                dense parameters -> the program -> their gradients ----------------> servers

The gradients of `window` batches are summed and pushed together, and dense parameters are pulled at
the same interval (`n_fetch` and `n_push` in Dean et al., 2012, appendix, figure 7).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import jax
import numpy as np

from jaxfleet.contrib.downpour.descriptions import DenseTableParameter, PSParameter
from jaxfleet.contrib.downpour.local_tables import SHOWN, LocalTables, Push
from jaxfleet.contrib.downpour.messages import description_of
from jaxfleet.contrib.downpour.worker_program import LookUp, declared, worker_program
from jaxfleet.errors import FeedError, ProgramError
from jaxfleet.fluid.executor.dataset_runs import Run, register_runner
from jaxfleet.fluid.framework.program import Program
from jaxfleet.fluid.lod_tensor import LoDTensor, create_lod_tensor
from jaxfleet.fluid.lowering.lod_values import fed_sequences
from jaxfleet.runtime.scope import Scope
from jaxfleet.tables.merge_pushes import merge

_LIVE: WeakKeyDictionary[PSParameter, "Tables"] = WeakKeyDictionary()


class Tables(Protocol):
    """A job's tables, as a worker uses them; see `LocalTables`."""

    def declare(self, table_id: int, name: str, dim: int, *, shows: bool) -> None: ...

    def begin_dense(self, table_id: int, values: Sequence[np.ndarray]) -> None: ...

    def look_up(self, name: str, keys: np.ndarray) -> np.ndarray: ...

    def peek(self, name: str, keys: np.ndarray) -> np.ndarray: ...

    def pull_dense(
        self, table_id: int, shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, np.ndarray]: ...

    def push(self, rows: Mapping[str, Push], dense: Mapping[int, Sequence[np.ndarray]]) -> None: ...


def described_tables(program: Program) -> PSParameter:
    """The description of a program's job; a program without one raises ProgramError."""
    desc = description_of((program._fleet_opt or {}).get("fleet_desc"))
    if not isinstance(desc, PSParameter):
        what = "the program is of no Downpour job: its _fleet_opt has no description of tables"
        raise ProgramError(what, hint="fluid.distributed.DownpourSGD(...).minimize([loss])")
    return desc


def tables_of(program: Program) -> Tables:
    """The tables of a program's job, which all programs of the job share."""
    desc = described_tables(program)
    if desc not in _LIVE:
        _LIVE[desc] = LocalTables(desc)
    return _LIVE[desc]


def attach_tables(program: Program, tables: Tables) -> None:
    """Replaces the tables of a program's job, by those on servers."""
    _LIVE[described_tables(program)] = tables


def detach_tables(program: Program) -> None:
    """Releases the tables of a program's job."""
    _LIVE.pop(described_tables(program), None)


@dataclass(frozen=True)
class _Found:
    """Result of a look-up."""

    keys: np.ndarray  # int64[u], unique
    places: np.ndarray  # int64[n], index of each id's key
    is_padding: np.ndarray | None  # bool[n], ids whose row is zero; None without padding
    sample: np.ndarray  # int64[n], index of each id's sample
    samples: int  # number of samples, including those without ids


class Worker:
    """Trains or evaluates a described program on batches; `run` executes it."""

    def __init__(self, program: Program, scope: Scope, run: Run, *, is_trained: bool) -> None:
        self._does = worker_program(program, is_trained=is_trained)
        self._scope, self._run, self._is_trained = scope, run, is_trained
        self._tables = tables_of(program)
        self._window = _window(program._fleet_opt)
        self._rows: dict[str, list[Push]] = {}
        self._shown: dict[str, list[Push]] = {}
        self._sums: dict[int, list[np.ndarray]] = {}
        self._batches = 0
        for one in self._does.look_ups:
            self._tables.declare(one.table_id, one.table, one.trained, shows=one.shows)
        for table in self._does.dense:
            values = [self._value(name) for name in table.dense_variable_name]
            self._tables.begin_dense(_id(table), values)

    def step(self, feed: Mapping[str, Any], fetch: Sequence[str]) -> list[Any]:
        """Runs one batch and returns the fetched values."""
        if self._batches % self._window == 0:
            self._pull()
        found = {one.rows: self._look_up(one, feed) for one in self._does.look_ups}
        given = self._given(feed, found)
        wanted = [*fetch, *self._grads()]
        made = self._run(self._does.program, given, wanted)
        if self._is_trained:
            grads = dict(zip(wanted[len(fetch) :], made[len(fetch) :], strict=True))
            self._take(grads, found, feed)
        self._batches += 1
        if self._batches % self._window == 0:
            self.push()
        return made[: len(fetch)]

    def push(self) -> None:
        """Pushes the gradients of all batches since the last push."""
        if not self._is_trained:
            return
        rows = {name: merge(pushes) for name, pushes in self._rows.items()}
        for name, pushes in self._shown.items():
            keys, counts = merge(pushes)
            rows[name + SHOWN] = keys, -counts  # count tables subtract pushed values
        self._tables.push(rows, self._sums)
        for waiting in (self._rows, self._shown, self._sums):
            waiting.clear()

    def close(self) -> None:
        """Pushes the remaining gradients, and stores the newest parameters in the scope."""
        if self._is_trained and self._batches % self._window:
            self.push()
        self._pull()

    def _pull(self) -> None:
        for table in self._does.dense:
            shapes = {
                name: declared(self._does.program, name).shape for name in table.dense_variable_name
            }
            values = self._tables.pull_dense(_id(table), shapes)
            self._scope.keep({n: jax.numpy.array(v, copy=True) for n, v in values.items()})

    def _grads(self) -> list[str]:
        if not self._is_trained:
            return []
        rows = [name for one in self._does.look_ups for name in one.grads]
        return [*rows, *(name for t in self._does.dense for name in t.dense_gradient_variable_name)]

    def _look_up(self, one: LookUp, feed: Mapping[str, Any]) -> tuple[_Found, np.ndarray]:
        """Looks up the rows of the fed ids: float32[n, width]."""
        ids, sample, samples = _ids(one.ids, feed)
        keys, places = np.unique(ids, return_inverse=True)
        is_padding = None if one.padding is None else ids == one.padding
        read = self._tables.look_up if self._is_trained else self._tables.peek
        rows = read(one.table, keys)
        if one.shows:
            rows = np.concatenate([read(one.table + SHOWN, keys), rows], axis=1)
        rows = rows[places]
        if is_padding is not None:
            rows[is_padding] = 0
        return _Found(keys, places, is_padding, sample, samples), rows

    def _given(
        self, feed: Mapping[str, Any], found: Mapping[str, tuple[_Found, np.ndarray]]
    ) -> dict[str, Any]:
        """The program's feed: the rows, and ids only if it reads them."""
        given, program = dict(feed), self._does.program
        for one in self._does.look_ups:
            value, rows = feed[one.ids], found[one.rows][1]
            if isinstance(value, LoDTensor):
                lengths = value.recursive_sequence_lengths()
                ids = declared(program, one.ids)
                ends = _ends(ids.shape)
                rows = rows.reshape(-1, *(ends[:-1] if one.ids_end else ends), one.width)
                if one.ids not in self._does.read:
                    # Only the lengths are read: keys may exceed the device's integer range.
                    like = create_lod_tensor(np.zeros((len(rows), *ends), np.int64), lengths)
                    given[one.ids] = like
                wanted = len(fed_sequences(program, ids, given[one.ids])[one.ids])
                last = np.repeat(rows[-1:], wanted - len(rows), axis=0)
                given[one.rows] = np.concatenate([rows, last])
                continue
            if one.ids not in self._does.read:
                given.pop(one.ids, None)
            shape = np.shape(value)[:-1] if one.ids_end else np.shape(value)
            given[one.rows] = rows.reshape(*shape, one.width)
        return given

    def _take(
        self,
        grads: Mapping[str, Any],
        found: Mapping[str, tuple[_Found, np.ndarray]],
        feed: Mapping[str, Any],
    ) -> None:
        """Adds a batch's gradients to the pending push."""
        for one in self._does.look_ups:
            ids = found[one.rows][0]
            for name in one.grads:
                self._rows.setdefault(one.table, []).append(self._summed(one, ids, grads[name]))
            if one.shows:
                self._shown.setdefault(one.table, []).append(_shown(one.click, ids, feed))
        for table in self._does.dense:
            names = table.dense_gradient_variable_name
            new = [np.asarray(grads[name], np.float32) for name in names]
            old = self._sums.get(_id(table))
            self._sums[_id(table)] = (
                new if old is None else [a + b for a, b in zip(old, new, strict=True)]
            )

    def _summed(self, one: LookUp, ids: _Found, grad: Any) -> Push:
        """Gradients of a look-up's rows, summed by key."""
        rows = np.asarray(grad, np.float32).reshape(-1, one.width)[: len(ids.places)]
        rows = rows[:, one.width - one.trained :]
        if one.scales:
            rows = rows * np.float32(ids.samples)
        if ids.is_padding is not None:
            keep = ~ids.is_padding
            return merge([(ids.keys[ids.places[keep]], rows[keep])])
        return merge([(ids.keys[ids.places], rows)])

    def _value(self, name: str) -> np.ndarray:
        if name not in self._scope:
            what = f"parameter '{name}' has no value yet"
            raise ProgramError(what, hint="run the startup program in this scope first")
        return np.asarray(self._scope.peek(name))


register_runner("fleet_desc", Worker)


def _ids(name: str, feed: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray, int]:
    """The ids fed to a variable, the sample of each, and the number of samples."""
    if name not in feed:
        what = f"'{name}' is looked up in a sparse table, and is not fed"
        raise FeedError(what, hint="keys go from the feed to the servers: a step computes none")
    value = feed[name]
    ids = np.asarray(value)
    if ids.dtype.kind not in "iu":
        raise FeedError(f"'{name}' is fed {ids.dtype}, and keys are whole numbers")
    if isinstance(value, LoDTensor):
        (lengths,) = value.recursive_sequence_lengths()
        samples = len(lengths)
        sample = np.repeat(np.arange(samples), lengths)
    else:
        samples = len(ids)
        sample = np.repeat(np.arange(samples), ids.size // max(samples, 1))
    return ids.reshape(-1).astype(np.int64, copy=False), sample, samples


def _ends(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(max(size, 1) for size in shape[1:])


def _shown(click: str, ids: _Found, feed: Mapping[str, Any]) -> Push:
    """Shows and clicks of each key: float32[u, 2]."""
    if click not in feed:
        what = f"shows and clicks are counted (use_cvm), and '{click}' is not fed"
        raise FeedError(what, hint=f"name the label '{click}'")
    clicks = np.asarray(feed[click]).reshape(-1).astype(np.float32)[ids.sample]
    return merge([(ids.keys[ids.places], np.stack([np.ones_like(clicks), clicks], 1))])


def _id(table: DenseTableParameter) -> int:
    assert table.table_id is not None
    return table.table_id


def _window(opt_info: Mapping[str, Any]) -> int:
    trainers = description_of(opt_info["fleet_desc"]).trainer_param
    return (trainers[0].push_dense_per_batch if trainers else None) or 1
