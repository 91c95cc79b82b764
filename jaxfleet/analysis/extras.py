"""What travels in a step besides gradients and parameters, read from a trainer's program."""

from collections.abc import Iterator
from dataclasses import dataclass

from jaxfleet.analysis.holdings import bytes_of
from jaxfleet.ir import Program, Variable

_MOVES = ("c_allreduce", "c_allgather", "c_alltoall", "c_reducescatter")


@dataclass(frozen=True)
class Extras:
    """Values that trainers and servers send each other so that the step stays exact.

    Attributes:
        count: values that trainers complete over all of them: losses, metrics, statistics.
        size_bytes: of those whose size is known, sent once and received once by each trainer.
        of_the_batch: how many have the batch's size, which is not known.
        fed_bytes: what trainer 0 sends besides gradients, since updates read it: data, the loss.
        answered_bytes: what each trainer receives besides parameters, since its metrics or its
            own state read what only servers make: a summed gradient, an update.
    """

    count: int = 0
    size_bytes: int = 0
    of_the_batch: int = 0
    fed_bytes: int = 0
    answered_bytes: int = 0

    @classmethod
    def of(cls, trainer: Program | None, *, push_bytes: int, pull_bytes: int) -> "Extras":
        """Returns the extras of trainer 0's program, made by `insert_send_recv`.

        Args:
            trainer: the program, or None where it is not at hand.
            push_bytes: the gradients that it sends.
            pull_bytes: the parameters that it receives.
        """
        if trainer is None:
            return cls()
        sizes = [_known_bytes(variable) for variable in _completed(trainer)]
        known = [size for size in sizes if size is not None]
        ops, lookup = trainer.root.ops, trainer.lookup
        sent = sum(bytes_of(lookup(x)) for op in ops if op.type == "send" for x in op.reads)
        got = sum(bytes_of(lookup(x)) for op in ops if op.type == "recv" for x in op.writes)
        fed, answered = max(0, sent - push_bytes), max(0, got - pull_bytes)
        return cls(len(sizes), sum(known), len(sizes) - len(known), fed, answered)

    def lines(self) -> Iterator[str]:
        """Yields a line for each kind of extra that there is."""
        if self.count:
            line = f"metrics and statistics: {self.count} completed over all trainers"
            line += f", {self.size_bytes:,} bytes each way for each trainer"
            unsized = f"; {self.of_the_batch} of the batch's size not counted"
            yield line + (unsized if self.of_the_batch else "")
        if self.fed_bytes:
            yield f"updates read {self.fed_bytes:,} bytes besides gradients: trainer 0 sends them"
        if self.answered_bytes:
            yield f"each trainer receives {self.answered_bytes:,} bytes besides parameters"


def _completed(program: Program) -> Iterator[Variable]:
    for block in program.blocks:
        for op in block.ops:
            if op.type.startswith(_MOVES):
                yield from (program.lookup(name, block) for name in op.reads)


def _known_bytes(variable: Variable) -> int | None:
    known = all(isinstance(size, int) for size in variable.shape)
    return bytes_of(variable) if known else None
