"""A server's checkpoints: its part of a job's, and its own for recovery.

Its part of a job's checkpoint can be read back with any other slicing. From its recovery
checkpoints it resumes when it is restarted.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from jaxfleet.analysis.placement.sliced_layout import rows_of_slices, server_variables
from jaxfleet.checkpoint import (
    Checkpoint,
    CheckpointSeries,
    PartReceipt,
    Piece,
    commit,
    open_checkpoint,
    write_part,
)
from jaxfleet.checkpoint.manifest import Link, Plain
from jaxfleet.checkpoint.tables import load_tables, table_pieces
from jaxfleet.checkpoint.tables.row_pieces import ArrayName
from jaxfleet.checkpoint.tables.saved_tables import layers_in
from jaxfleet.checkpoint.tables.table_series import followed
from jaxfleet.errors import CheckpointError, JaxfleetError
from jaxfleet.ir import Kind, Program, parse, print_program
from jaxfleet.ir.serialization import with_values
from jaxfleet.observability.notices import alert
from jaxfleet.ps.server.execution_plan import ServerPlan
from jaxfleet.ps.server.options import ServerOptions
from jaxfleet.ps.server.own_state import OwnState
from jaxfleet.ps.server.past_rows import PastRows
from jaxfleet.ps.server.scheduler import Progress
from jaxfleet.tables import TableStore, make_store

_BLOCK = ".block"


@dataclass(frozen=True)
class SliceRange:
    """Range of a slice in its leaf; `start` is its first row, -1 for a full copy."""

    leaf: str
    start: int
    rows: int


def find_slice_ranges(plan: ServerPlan) -> dict[str, SliceRange]:
    """Returns the ranges of the server's slices; whole leaves are omitted."""
    rows, held = rows_of_slices(plan.program), server_variables(plan.program)
    cuts = {}
    for name in plan.state:
        leaf, number = _split(name)
        # A whole leaf has no slices: then `w.block0` is the user's own name.
        if number is not None and number < len(rows.get(leaf, ())) > 1:
            cuts[name] = SliceRange(leaf, sum(rows[leaf][:number]), sum(rows[leaf]))
    for block in plan.blocks:
        touched = dict.fromkeys((*block.lowered.writes, *block.lowered.reads))
        totals = [cuts[name] for name in touched if name in cuts]
        for name in touched:
            if name not in plan.state or name in cuts or not totals:
                continue
            leaf, start = held.get(name, (_split(name)[0], totals[0].start))
            if _split(name)[1] is not None:
                cuts[name] = SliceRange(leaf, start, totals[0].rows)
    return cuts


def save_part(
    folder: Path,
    plan: ServerPlan,
    arrays: Mapping[str, np.ndarray],
    step: int,
    stores: Sequence[TableStore] = (),
) -> PartReceipt:
    """Writes this server's part of a checkpoint, including the rows of its tables."""
    cuts = find_slice_ranges(plan)
    owned = _owned(plan)

    def piece(name: str, array: np.ndarray) -> Piece:
        cut = cuts.get(name)
        if cut is None:
            return Piece.whole(name, array, shared=name not in owned)
        if cut.start < 0:
            return Piece.whole(cut.leaf, array, shared=True)
        return Piece(cut.leaf, array, cut.start, (cut.rows, *array.shape[1:]))

    # Of several copies on this server, one is enough.
    copies: dict[str, str] = {c.leaf: name for name, c in cuts.items() if c.start < 0}
    kept = [n for n in arrays if n not in cuts or cuts[n].start >= 0 or copies[cuts[n].leaf] == n]
    dense = (piece(name, arrays[name]) for name in kept)
    pieces = chain(dense, table_pieces(stores, buckets=plan.buckets))
    return write_part(folder, f"server {plan.server}", pieces, step=step)


def save_tables_part(
    folder: Path, plan: ServerPlan, step: int, stores: Sequence[TableStore]
) -> PartReceipt:
    """Writes this server's part of a checkpoint of tables only."""
    pieces = table_pieces(stores, buckets=plan.buckets)
    return write_part(folder, f"server {plan.server}", pieces, step=step)


def load_state(folder: Path, plan: ServerPlan) -> tuple[dict[str, np.ndarray], int]:
    """Reads this server's state from a checkpoint, with any slicing, and the checkpoint's step.

    Raises:
        CheckpointError: it is missing, damaged, or lacks a variable.
    """
    checkpoint, cuts = open_checkpoint(folder), find_slice_ranges(plan)
    arrays = {}
    for name in plan.state:
        wanted = plan.types[name]
        cut = cuts.get(name, SliceRange(name, -1, 0))
        if cut.start >= 0:
            array = checkpoint.read(cut.leaf, cut.start, cut.start + wanted.shape[0])
        else:
            array = checkpoint.read(cut.leaf)
        if array.dtype != wanted.dtype or array.shape != wanted.shape:
            what = f"'{name}' is {array.dtype}{list(array.shape)} in {folder}"
            raise CheckpointError(f"{what}, not {wanted.dtype}{list(wanted.shape)}")
        arrays[name] = array
    return arrays, checkpoint.step


def load_stores(found: Sequence[Checkpoint], plan: ServerPlan) -> list[TableStore]:
    """Loads this server's rows from a checkpoint, followed by those that it is incremental to.

    Any number of servers may have written them.
    """
    stores = [make_store(spec, share=plan.share) for spec in plan.tables]
    if stores:
        load_tables(found, stores, buckets=plan.buckets)
    return stores


def _split(name: str) -> tuple[str, int | None]:
    """Returns a slice's leaf and its number: `w` and 1 for `w.block1`."""
    leaf, found, number = name.rpartition(_BLOCK)
    return (leaf, int(number)) if found and number.isdigit() else (name, None)


def _owned(plan: ServerPlan) -> set[str]:
    """Returns the variables that only this server has: those updated along with a parameter."""
    found: set[str] = set()
    for block in plan.blocks:
        made = [name for name in block.lowered.writes if name in plan.state]
        if any(plan.state[name].kind is Kind.PARAM for name in made):
            found.update(made)
    return found


_VALUE = "values/"
_CONSTANT = "constants/"
_EXTRA = "extras/"
_PART = "parts/"
_OWN = "own/"
_RESULT = "result/"
_PAST_KEYS, _PAST_ROWS = "past_keys/", "past_rows/"
_NO_KEYS, _NO_ROWS = np.zeros(0, np.int64), np.zeros((0, 1), np.float32)
_TEXT = "job_text"


@dataclass(frozen=True)
class RetainedValues:
    """Values beyond a server's state that peers may still request.

    Attributes:
        extras: initial values of the trainers' own state.
        parts: partial sums sent to other servers, by step and name.
        shrunk: `ServerTable.shrunk` of each table.
        own: the trainers' own state, as `ServerState.own`.
        base: the step of the state that the job began with.
        data: the position of the job's ledger of samples, if it has one.
        epoch: number of changes of the job's trainers before.
        results: values that blocks have computed in a step that is incomplete.
        past: the rows of each table before its last update, for trainers that repeat the step.
    """

    extras: Mapping[str, np.ndarray] = field(default_factory=dict)
    extras_step: int = 0
    parts: Mapping[int, Mapping[str, np.ndarray]] = field(default_factory=dict)
    shrunk: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    text: np.ndarray | None = None
    own: Mapping[int, OwnState] = field(default_factory=dict)
    base: int = 0
    data: Mapping[str, Plain] | None = None
    epoch: int = 0
    results: Mapping[str, np.ndarray] = field(default_factory=dict)
    past: Mapping[str, PastRows] = field(default_factory=dict)

    def pieces(self) -> Iterator[Piece]:
        if self.text is not None:
            yield Piece.whole(_TEXT, self.text)
        for name, array in self.results.items():
            yield Piece.whole(_RESULT + name, array)
        for name, past in self.past.items():
            if len(past.keys):
                yield Piece.whole(_PAST_KEYS + name, past.keys)
                yield Piece.whole(_PAST_ROWS + name, past.rows)
        for name, array in self.extras.items():
            yield Piece.whole(_EXTRA + name, array)
        for step, arrays in self.parts.items():
            for name, array in arrays.items():
                yield Piece.whole(f"{_PART}{step}/{name}", array)
        for trainer, state in self.own.items():
            for name, of_leaf in state.versions.items():
                for step, array in of_leaf.items():
                    yield Piece.whole(f"{_OWN}{trainer}/{step}/{name}", array)

    def past_steps(self) -> dict[str, Plain]:
        return {name: past.step for name, past in self.past.items()}

    def own_steps(self) -> dict[str, Plain]:
        return {str(trainer): state.step for trainer, state in self.own.items()}

    @classmethod
    def read(cls, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> "RetainedValues":
        parts: dict[int, dict[str, np.ndarray]] = {}
        for key, array in _under(_PART, arrays).items():
            step, _, name = key.partition("/")
            parts.setdefault(int(step), {})[name] = array
        last = facts.get("shrunk", {})
        shrunk = {name: (token, count) for name, (token, count) in last.items()}
        own = {int(trainer): OwnState(step) for trainer, step in facts.get("own_steps", {}).items()}
        for key, array in _under(_OWN, arrays).items() if own else ():  # older ones have none
            trainer, step, name = key.split("/", 2)
            own[int(trainer)].versions.setdefault(name, {})[int(step)] = array
        extras, text, base = _under(_EXTRA, arrays), arrays.get(_TEXT), facts.get("base", 0)
        at, data = facts["extras_step"], facts.get("data")
        epoch = facts.get("epoch", 0)
        results, keys, rows = (_under(at, arrays) for at in (_RESULT, _PAST_KEYS, _PAST_ROWS))
        past = {
            name: PastRows(step, keys.get(name, _NO_KEYS), rows.get(name, _NO_ROWS))
            for name, step in facts.get("past_steps", {}).items()
        }
        return cls(extras, at, parts, shrunk, text, own, base, data, epoch, results, past)


@dataclass(frozen=True)
class RestoredServer:
    """The content of a recovery checkpoint.

    Attributes:
        job_program: hash of the job's program.
        chain: checkpoints with the rows of its tables: this one, and those it is incremental to.
    """

    program: Program
    arrays: Mapping[str, np.ndarray]
    progress: Progress
    job_program: str
    retained: RetainedValues
    chain: Sequence[Checkpoint] = ()


@dataclass(frozen=True)
class RecoveryCheckpoints:
    """A server's recovery checkpoints."""

    series: CheckpointSeries

    @classmethod
    def of(cls, options: ServerOptions) -> "RecoveryCheckpoints | None":
        """Returns a server's recovery checkpoints, None if it keeps none."""
        folder = options.checkpoint_dir
        if folder is None:
            return None
        if options.server is None:
            what = "a server that keeps checkpoints must know its number"
            raise JaxfleetError(what, hint="ServerOptions(server=0, ...)")
        return cls(CheckpointSeries(folder / f"server{options.server}", keep=options.keep))

    def save(
        self,
        plan: ServerPlan,
        arrays: Mapping[str, np.ndarray],
        progress: Progress,
        *,
        job_program: str,
        retained: RetainedValues,
        stores: Sequence[TableStore] = (),
        after: int | None = None,
        anew: bool = False,
    ) -> PartReceipt:
        """Writes the state and the program, and removes older checkpoints.

        Args:
            plan: the program.
            arrays: its state.
            progress: the steps included.
            job_program: hash of the job's program.
            retained: other values to retain.
            stores: the rows of its tables.
            after: number of an older checkpoint; of tables, only changes since are written.
            anew: the server continues from this one regardless of its past: later ones are void.
        """
        step = progress.number
        older = followed(self.series, after, step) if stores and after is not None else None
        since = {} if older is None else dict.fromkeys(layers_in(older), older.step)
        folder = self.series.path(step)
        facts: dict[str, Plain] = {
            "program": print_program(plan.program),
            "job_program": job_program,
            "extras_step": retained.extras_step,
            "own_steps": retained.own_steps(),
            "past_steps": retained.past_steps(),
            "base": retained.base,
            "epoch": retained.epoch,
            "data": None if retained.data is None else dict(retained.data),
            "shrunk": {name: list(said) for name, said in retained.shrunk.items()},
            "steps": _plain(progress.steps),
            "kinds": {kind: _plain(done) for kind, done in progress.kinds.items()},
        }
        pieces = [Piece.whole(_VALUE + name, array) for name, array in arrays.items()]
        pieces += [Piece.whole(_CONSTANT + digest, a) for digest, a in _constants(plan.program)]
        pieces += retained.pieces()
        rows = table_pieces(stores, buckets=plan.buckets, since=since)
        receipt = write_part(folder, f"server {plan.server}", chain(pieces, rows), step=step)
        link = None if older is None else Link(older.step, older.sha256)
        commit(folder, [receipt], step=step, facts=facts, after=link)
        if anew:
            self.series.remove_after(step)
        self.series.prune()
        for store in stores:
            store.forget_gone(step)
        return receipt

    def forget(self) -> None:
        """Removes all of them."""
        self.series.remove_after(-1)

    def restore(self, warn: Callable[[str], None] = alert) -> RestoredServer | None:
        """Reads the last valid checkpoint, and passes to `warn` why each later one is invalid."""
        step = self.series.latest(warn=warn)
        if step is None:
            return None
        checkpoint, *older = self.series.chain(step)
        names = [name for name in checkpoint.names() if ArrayName.read(name) is None]
        read = {name: checkpoint.read(name) for name in names}
        facts: Mapping[str, Any] = checkpoint.facts  # as `save` writes them
        program = with_values(parse(facts["program"]), _under(_CONSTANT, read))
        kinds = {kind: _numbers(done) for kind, done in facts["kinds"].items()}
        return RestoredServer(
            program,
            _under(_VALUE, read),
            Progress(step, _numbers(facts["steps"]), kinds),
            facts["job_program"],
            RetainedValues.read(read, facts),
            (checkpoint, *older),
        )


def _under(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


def _plain(steps: Mapping[int, int]) -> dict[str, Plain]:
    return {str(trainer): step for trainer, step in steps.items()}


def _numbers(plain: Mapping[str, int]) -> dict[int, int]:
    return {int(trainer): step for trainer, step in plain.items()}


def _constants(program: Program) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the distinct values of constants by digest."""
    seen = set()
    for scope in (program.variables, *(block.variables for block in program.blocks)):
        for variable in scope.values():
            constant = variable.constant
            if constant is not None and constant.digest not in seen:
                seen.add(constant.digest)
                yield constant.digest, np.asarray(constant.value)
