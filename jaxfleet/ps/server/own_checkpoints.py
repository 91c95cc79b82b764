"""A server's own checkpoints: from them it goes on when it is started again."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

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
from jaxfleet.errors import JaxfleetError
from jaxfleet.ir import Program, parse, print_program
from jaxfleet.ir.resources import with_values
from jaxfleet.ps.server.options import ServerOptions
from jaxfleet.ps.server.plan import ServerPlan

_VALUE = "values/"
_CONSTANT = "constants/"
_EXTRA = "extras/"
_PART = "parts/"


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
class Restored:
    """What a server's own checkpoint holds.

    Attributes:
        program: the server's, with the values of its constants.
        arrays: its state.
        step: the last step that is in it.
        job_program: the hash of the job's program.
        aside: what it kept besides.
    """

    program: Program
    arrays: Mapping[str, np.ndarray]
    step: int
    job_program: str
    aside: Aside


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


def own_checkpoints(options: ServerOptions) -> OwnCheckpoints | None:
    """Returns where a server keeps its own checkpoints, None where it keeps none.

    Raises:
        JaxfleetError: it does not know which server it is.
    """
    folder = options.checkpoint_dir
    if folder is None:
        return None
    if options.server is None:
        what = "a server that keeps checkpoints must know its number"
        raise JaxfleetError(what, hint="ServerOptions(server=0, ...)")
    return OwnCheckpoints(CheckpointSeries(folder / f"server{options.server}", keep=options.keep))


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
