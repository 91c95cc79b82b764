"""A server's recovery checkpoints, from which it resumes when it is restarted."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType

import numpy as np

from jaxfleet.checkpoint import (
    Checkpoint,
    CheckpointSeries,
    PartReceipt,
    Piece,
    commit,
    write_part,
)
from jaxfleet.checkpoint.manifest import Link, Plain
from jaxfleet.checkpoint.tables import table_pieces
from jaxfleet.checkpoint.tables.row_pieces import ArrayName
from jaxfleet.checkpoint.tables.saved_tables import layers_in
from jaxfleet.checkpoint.tables.table_series import followed
from jaxfleet.errors import JaxfleetError
from jaxfleet.ir import Program, parse, print_program
from jaxfleet.ir.serialization import with_values
from jaxfleet.observability.notices import alert
from jaxfleet.ps.server.execution_plan import ServerPlan
from jaxfleet.ps.server.options import ServerOptions
from jaxfleet.tables import TableStore

_VALUE = "values/"
_CONSTANT = "constants/"
_EXTRA = "extras/"
_PART = "parts/"
_TEXT = "job_text"
_NO_KINDS: Mapping[str, Mapping[int, int]] = MappingProxyType({})


@dataclass(frozen=True)
class RetainedValues:
    """Values beyond a server's state that peers may still request.

    Attributes:
        extras: initial values of the trainers' own state.
        parts: partial sums sent to other servers, by step and name.
        shrunk: `ServerTable.shrunk` of each table.
    """

    extras: Mapping[str, np.ndarray] = field(default_factory=dict)
    extras_step: int = 0
    parts: Mapping[int, Mapping[str, np.ndarray]] = field(default_factory=dict)
    shrunk: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    text: np.ndarray | None = None

    def pieces(self) -> Iterator[Piece]:
        if self.text is not None:
            yield Piece.whole(_TEXT, self.text)
        for name, array in self.extras.items():
            yield Piece.whole(_EXTRA + name, array)
        for step, arrays in self.parts.items():
            for name, array in arrays.items():
                yield Piece.whole(f"{_PART}{step}/{name}", array)

    @classmethod
    def read(
        cls, arrays: Mapping[str, np.ndarray], facts: Mapping[str, object]
    ) -> "RetainedValues":
        parts: dict[int, dict[str, np.ndarray]] = {}
        for key, array in _under(_PART, arrays).items():
            step, _, name = key.partition("/")
            parts.setdefault(int(step), {})[name] = array
        shrunk = {name: _shrunk(said) for name, said in _fields(facts.get("shrunk", {})).items()}
        extras_step = int(str(facts["extras_step"]))
        return cls(_under(_EXTRA, arrays), extras_step, parts, shrunk, arrays.get(_TEXT))


@dataclass(frozen=True)
class RestoredServer:
    """The content of a recovery checkpoint.

    Attributes:
        program: the server's, with the values of its constants.
        step: number of the checkpoint: the last step included, if trainers wait for each other.
        steps: the last step included of each trainer.
        kinds: the same for parameters and each table, if their steps differ.
        job_program: hash of the job's program.
        chain: checkpoints with the rows of its tables: this one, and those it is incremental to.
    """

    program: Program
    arrays: Mapping[str, np.ndarray]
    step: int
    steps: Mapping[int, int]
    kinds: Mapping[str, Mapping[int, int]]
    job_program: str
    retained: RetainedValues
    chain: Sequence[Checkpoint] = ()


@dataclass(frozen=True)
class RecoveryCheckpoints:
    """A server's recovery checkpoints."""

    series: CheckpointSeries

    def save(
        self,
        plan: ServerPlan,
        arrays: Mapping[str, np.ndarray],
        step: int,
        *,
        steps: Mapping[int, int],
        kinds: Mapping[str, Mapping[int, int]] = _NO_KINDS,
        job_program: str,
        retained: RetainedValues | None = None,
        stores: Sequence[TableStore] = (),
        after: int | None = None,
        anew: bool = False,
    ) -> PartReceipt:
        """Writes the state and the program, and removes older checkpoints.

        Args:
            plan: the program.
            arrays: its state.
            step: number of the checkpoint.
            steps: the last step included of each trainer.
            kinds: the same for parameters and each table, if their steps differ.
            job_program: hash of the job's program.
            retained: other values to retain.
            stores: the rows of its tables.
            after: number of an older checkpoint; of tables, only changes since are written.
            anew: the server continues from this one regardless of its past: later ones are void.
        """
        older = followed(self.series, after, step) if stores and after is not None else None
        since = {} if older is None else dict.fromkeys(layers_in(older), older.step)
        folder = self.series.path(step)
        retained = retained or RetainedValues()
        facts: dict[str, Plain] = {
            "program": print_program(plan.program),
            "job_program": job_program,
            "extras_step": retained.extras_step,
            "shrunk": {name: list(said) for name, said in retained.shrunk.items()},
            "steps": _plain(steps),
            "kinds": {kind: _plain(done) for kind, done in kinds.items()},
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

    def restore(self, warn: Callable[[str], None] = alert) -> RestoredServer | None:
        """Reads the last valid checkpoint, and passes to `warn` why each later one is invalid."""
        step = self.series.latest(warn=warn)
        if step is None:
            return None
        checkpoint, *older = self.series.chain(step)
        names = [name for name in checkpoint.names() if ArrayName.read(name) is None]
        read = {name: checkpoint.read(name) for name in names}
        program = with_values(parse(str(checkpoint.facts["program"])), _under(_CONSTANT, read))
        job_program = str(checkpoint.facts["job_program"])
        retained = RetainedValues.read(read, checkpoint.facts)
        arrays, found = _under(_VALUE, read), (checkpoint, *older)
        steps = _numbers(checkpoint.facts["steps"])
        kinds = {kind: _numbers(done) for kind, done in _fields(checkpoint.facts["kinds"]).items()}
        return RestoredServer(program, arrays, step, steps, kinds, job_program, retained, found)


def recovery_checkpoints(options: ServerOptions) -> RecoveryCheckpoints | None:
    """Returns a server's recovery checkpoints, None if it keeps none."""
    folder = options.checkpoint_dir
    if folder is None:
        return None
    if options.server is None:
        what = "a server that keeps checkpoints must know its number"
        raise JaxfleetError(what, hint="ServerOptions(server=0, ...)")
    return RecoveryCheckpoints(
        CheckpointSeries(folder / f"server{options.server}", keep=options.keep)
    )


def _under(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


def _plain(steps: Mapping[int, int]) -> dict[str, Plain]:
    return {str(trainer): step for trainer, step in steps.items()}


def _fields(plain: object) -> dict[str, object]:
    assert isinstance(plain, dict)
    return plain


def _numbers(plain: object) -> dict[int, int]:
    return {int(trainer): int(str(step)) for trainer, step in _fields(plain).items()}


def _constants(program: Program) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the distinct values of constants by digest."""
    seen = set()
    for scope in (program.variables, *(block.variables for block in program.blocks)):
        for variable in scope.values():
            constant = variable.constant
            if constant is not None and constant.digest not in seen:
                seen.add(constant.digest)
                yield constant.digest, np.asarray(constant.value)


def _shrunk(said: object) -> tuple[str, int]:
    token, count = said if isinstance(said, list) else ("", 0)
    return str(token), int(str(count))
