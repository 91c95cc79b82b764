"""Writes what a server holds into checkpoints, and reads it from them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from jaxfleet.checkpoint import (
    CheckpointSeries,
    PartReceipt,
    Piece,
    commit,
    open_checkpoint,
    write_part,
)
from jaxfleet.checkpoint.pieces import Plain
from jaxfleet.errors import CheckpointError
from jaxfleet.ir import Kind, Program, parse, print_program
from jaxfleet.ir.resources import with_values
from jaxfleet.ps.server.plan import ServerPlan

_BLOCK = ".block"
_VALUE = "values/"
_CONSTANT = "constants/"
_EXTRA = "extras/"
_PART = "parts/"


@dataclass(frozen=True)
class Cut:
    """Where a slice lies in its leaf.

    Attributes:
        leaf: the leaf's name.
        start: the slice's first row; -1 for a copy of all of it.
        rows: how many rows the leaf has.
    """

    leaf: str
    start: int
    rows: int


def find_cuts(plan: ServerPlan) -> dict[str, Cut]:
    """Returns where each slice lies that the server holds; what is whole is left out."""
    rows, held = _rows(plan.program), _held(plan.program)
    cuts = {}
    for name in plan.state:
        leaf, number = _split(name)
        # Of a leaf that is whole there is no slice: then `w.block0` is the user's own name.
        if number is not None and number < len(rows.get(leaf, ())) > 1:
            cuts[name] = Cut(leaf, sum(rows[leaf][:number]), sum(rows[leaf]))
    for block in plan.blocks:
        touched = dict.fromkeys((*block.makes, *block.lowered.reads))
        totals = [cuts[name] for name in touched if name in cuts]
        for name in touched:
            if name not in plan.state or name in cuts or not totals:
                continue
            leaf, start = held.get(name, (_split(name)[0], totals[0].start))
            if _split(name)[1] is not None:
                cuts[name] = Cut(leaf, start, totals[0].rows)
    return cuts


def save_part(
    folder: Path, plan: ServerPlan, arrays: Mapping[str, np.ndarray], step: int
) -> PartReceipt:
    """Writes this server's part of a checkpoint.

    Raises:
        CheckpointError: it cannot be written.
    """
    cuts = find_cuts(plan)
    owned = _owned(plan)

    def piece(name: str, array: np.ndarray) -> Piece:
        cut = cuts.get(name)
        if cut is None:
            return Piece.whole(name, array, shared=name not in owned)
        if cut.start < 0:
            return Piece.whole(cut.leaf, array, shared=True)
        return Piece(cut.leaf, array, cut.start, (cut.rows, *array.shape[1:]))

    # Of copies that this server has several of, one is enough.
    copies: dict[str, str] = {c.leaf: name for name, c in cuts.items() if c.start < 0}
    kept = [n for n in arrays if n not in cuts or cuts[n].start >= 0 or copies[cuts[n].leaf] == n]
    pieces = (piece(name, arrays[name]) for name in kept)
    return write_part(folder, f"server {plan.server}", pieces, step=step)


def load_state(folder: Path, plan: ServerPlan) -> tuple[dict[str, np.ndarray], int]:
    """Reads what this server holds from a checkpoint, however it was cut.

    Returns:
        The arrays, and the checkpoint's step.

    Raises:
        CheckpointError: there is none, it is damaged, or has not what the server needs.
    """
    checkpoint, cuts = open_checkpoint(folder), find_cuts(plan)
    arrays = {}
    for name in plan.state:
        wanted = plan.types[name]
        cut = cuts.get(name, Cut(name, -1, 0))
        if cut.start >= 0:
            array = checkpoint.read(cut.leaf, cut.start, cut.start + wanted.shape[0])
        else:
            array = checkpoint.read(cut.leaf)
        if array.dtype != wanted.dtype or array.shape != wanted.shape:
            what = f"'{name}' is {array.dtype}{list(array.shape)} in {folder}"
            raise CheckpointError(f"{what}, not {wanted.dtype}{list(wanted.shape)}")
        arrays[name] = array
    return arrays, checkpoint.step


@dataclass(frozen=True)
class Restored:
    """What a server's own checkpoint holds.

    Attributes:
        program: the server's, with the values of its constants.
        arrays: its state.
        step: the last step that is in it.
        job_program: the hash of the job's program.
    """

    program: Program
    arrays: Mapping[str, np.ndarray]
    step: int
    job_program: str
    aside: "Aside"


@dataclass(frozen=True)
class Aside:
    """What a server keeps besides its state, and others may still ask it for.

    Attributes:
        extras: what the trainers' own state starts from.
        extras_step: the step that those are of.
        parts: what was sent to other servers, by step and name.
    """

    extras: Mapping[str, np.ndarray] = field(default_factory=dict)
    extras_step: int = 0
    parts: Mapping[int, Mapping[str, np.ndarray]] = field(default_factory=dict)

    def pieces(self) -> Iterator[Piece]:
        """Yields them as they are written."""
        for name, array in self.extras.items():
            yield Piece.whole(_EXTRA + name, array)
        for step, arrays in self.parts.items():
            for name, array in arrays.items():
                yield Piece.whole(f"{_PART}{step}/{name}", array)

    @classmethod
    def read(cls, arrays: Mapping[str, np.ndarray], extras_step: int) -> "Aside":
        """Returns what was written."""
        parts: dict[int, dict[str, np.ndarray]] = {}
        for key, array in _under(_PART, arrays).items():
            step, _, name = key.partition("/")
            parts.setdefault(int(step), {})[name] = array
        return cls(_under(_EXTRA, arrays), extras_step, parts)


@dataclass(frozen=True)
class OwnCheckpoints:
    """A server's own checkpoints, from which it goes on when it is started again.

    Attributes:
        series: where they are.
    """

    series: CheckpointSeries

    def save(
        self,
        plan: ServerPlan,
        arrays: Mapping[str, np.ndarray],
        step: int,
        *,
        job_program: str,
        aside: Aside | None = None,
    ) -> PartReceipt:
        """Writes the state with the program, and removes older ones.

        Raises:
            CheckpointError: it cannot be written.
        """
        folder = self.series.path(step)
        aside = aside or Aside()
        facts: dict[str, Plain] = {
            "program": print_program(plan.program),
            "job_program": job_program,
            "extras_step": aside.extras_step,
        }
        pieces = [Piece.whole(_VALUE + name, array) for name, array in arrays.items()]
        pieces += [Piece.whole(_CONSTANT + digest, a) for digest, a in _constants(plan.program)]
        pieces += aside.pieces()
        receipt = write_part(folder, f"server {plan.server}", pieces, step=step)
        commit(folder, [receipt], step=step, facts=facts)
        self.series.prune()
        return receipt

    def restore(self) -> Restored | None:
        """Reads the last good one.

        Raises:
            CheckpointError: it cannot be read.
        """
        step = self.series.latest()
        if step is None:
            return None
        checkpoint = open_checkpoint(self.series.path(step))
        read = {name: checkpoint.read(name) for name in checkpoint.names()}
        program = with_values(parse(str(checkpoint.facts["program"])), _under(_CONSTANT, read))
        job_program = str(checkpoint.facts["job_program"])
        aside = Aside.read(read, int(str(checkpoint.facts["extras_step"])))
        return Restored(program, _under(_VALUE, read), step, job_program, aside)


def _under(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


def _constants(program: Program) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the values of constants by digest, each once."""
    seen = set()
    for scope in (program.variables, *(block.variables for block in program.blocks)):
        for variable in scope.values():
            constant = variable.constant
            if constant is not None and constant.digest not in seen:
                seen.add(constant.digest)
                yield constant.digest, np.asarray(constant.value)


def _rows(program: Program) -> dict[str, tuple[int, ...]]:
    """Returns the rows of each block of each parameter, as the program's attribute has them."""
    found = {}
    listed = program.attrs.get("slices", ())
    assert isinstance(listed, tuple)
    for item in listed:
        assert isinstance(item, tuple)
        name, rows = item
        assert isinstance(rows, tuple)
        found[str(name)] = tuple(int(str(count)) for count in rows)
    return found


def _held(program: Program) -> dict[str, tuple[str, int]]:
    """Returns the leaf and the first row of each slice that the program's attribute names."""
    found = {}
    listed = program.attrs.get("holds", ())
    assert isinstance(listed, tuple)
    for item in listed:
        match item:
            case (str(name), str(leaf), int(start)):
                found[name] = (leaf, start)
    return found


def _split(name: str) -> tuple[str, int | None]:
    """Returns a slice's leaf and its number: `w` and 1 for `w.block1`."""
    leaf, found, number = name.rpartition(_BLOCK)
    return (leaf, int(number)) if found and number.isdigit() else (name, None)


def _owned(plan: ServerPlan) -> set[str]:
    """Returns the variables that no other server holds: those updated along with a parameter."""
    found: set[str] = set()
    for block in plan.blocks:
        made = [name for name in block.makes if name in plan.state]
        if any(plan.state[name].kind is Kind.PARAM for name in made):
            found.update(made)
    return found
