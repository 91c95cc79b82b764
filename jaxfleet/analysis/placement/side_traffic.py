"""Side traffic of a step: values sent besides gradients, and received besides parameters."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from jaxfleet.analysis.memory.costs import itemsize
from jaxfleet.analysis.placement.policies import bytes_of
from jaxfleet.ir import Dim, Program, Variable, evaluate

_REDUCTIONS = ("c_allreduce", "c_reducescatter")  # every rank sends as much as it receives
_GATHERS = ("c_allgather", "c_alltoall")  # every rank receives the data of all
_LOOK_UPS = frozenset({"table_lookup", "distributed_lookup_table"})
_ROW_ELEMENT_BYTES, _KEY_BYTES = 4, 8


@dataclass(frozen=True)
class TableRows:
    """The most rows that a trainer looks up in a table in a step: every key distinct."""

    table: str
    row_bytes: int  # of one row, and of its gradient
    count: int | None  # of rows; None if it depends on an unknown batch size

    def __str__(self) -> str:
        begin = f"table '{self.table}': each trainer sends"
        if self.count is None:
            return (
                f"{begin} the batch's keys and receives rows of {self.row_bytes} bytes; gradients "
                "as large go back (not counted)"
            )
        return (
            f"{begin} at most {self.count:,} keys of {_KEY_BYTES} bytes and receives "
            f"{self.count * self.row_bytes:,} bytes of rows; gradients as large go back"
        )


@dataclass(frozen=True)
class SideTraffic:
    """Values that trainers and servers exchange so that the step stays exact."""

    count: int = 0  # values that trainers complete over all of them: losses, metrics, statistics
    size_bytes: int = 0  # of those of known size, sent once and received once by each trainer
    # the number of values, gathered ones included, with an unknown batch size
    of_the_batch: int = 0
    gathered: int = 0  # values that each trainer collects from all: rows of the batch
    gather_sent_bytes: int = 0  # sent of those by each trainer, where the size is known
    gather_received_bytes: int = 0  # received of them
    tables: tuple[TableRows, ...] = ()
    # sent by trainer 0 besides gradients, because updates read it: data, the loss
    fed_bytes: int = 0
    # received by each trainer besides parameters, because its metrics or its own state read a value
    # made by servers: a summed gradient, an update
    answered_bytes: int = 0

    @classmethod
    def of(
        cls,
        trainer: Program | None,
        *,
        push_bytes: int,
        pull_bytes: int,
        trainers: int,
        sizes: Mapping[str, int],
    ) -> "SideTraffic":
        """Returns the side traffic of trainer 0's program, made by `insert_send_recv`.

        It sends gradients of `push_bytes` and receives parameters of `pull_bytes`; `sizes` are
        those of letters, where known. Without the program the traffic is empty.
        """
        if trainer is None:
            return cls()
        summed = [_bytes(variable, sizes) for variable in _read_by(trainer, _REDUCTIONS)]
        gathered = [_bytes(variable, sizes) for variable in _read_by(trainer, _GATHERS)]
        sent = sum(size for size in gathered if size is not None)
        ops, lookup = trainer.root.ops, trainer.lookup
        pushed = sum(bytes_of(lookup(x)) for op in ops if op.type == "send" for x in op.reads)
        pulled = sum(bytes_of(lookup(x)) for op in ops if op.type == "recv" for x in op.writes)
        return cls(
            count=len(summed),
            size_bytes=sum(size for size in summed if size is not None),
            of_the_batch=[*summed, *gathered].count(None),
            gathered=len(gathered),
            gather_sent_bytes=sent,
            gather_received_bytes=sent * trainers,
            tables=tuple(_table_rows(trainer, sizes)),
            fed_bytes=max(0, pushed - push_bytes),
            answered_bytes=max(0, pulled - pull_bytes),
        )

    def lines(self) -> Iterator[str]:
        unsized = f"; {self.of_the_batch} of the batch's size not counted"
        unsized = unsized if self.of_the_batch else ""
        if self.count:
            line = f"metrics and statistics: {self.count} completed over all trainers"
            line += f", {self.size_bytes:,} bytes each way for each trainer"
            yield line + ("" if self.gathered else unsized)
        if self.gathered:
            yield (
                f"all-gathers: {self.gathered} over all trainers, {self.gather_sent_bytes:,} bytes "
                f"sent and {self.gather_received_bytes:,} received by each trainer{unsized}"
            )
        yield from map(str, self.tables)
        if self.fed_bytes:
            yield f"updates read {self.fed_bytes:,} bytes besides gradients: trainer 0 sends them"
        if self.answered_bytes:
            yield f"each trainer receives {self.answered_bytes:,} bytes besides parameters"


def _read_by(program: Program, types: tuple[str, ...]) -> Iterator[Variable]:
    for block in program.blocks:
        for op in block.ops:
            if op.type.startswith(types):
                yield from (program.lookup(name, block) for name in op.reads)


def _bytes(variable: Variable, sizes: Mapping[str, int]) -> int | None:
    count = _elements([variable], sizes)
    return None if count is None else count * itemsize(variable.dtype)


def _elements(variables: Iterable[Variable], sizes: Mapping[str, int]) -> int | None:
    """Returns the number of elements of some variables together, or None if not known."""
    shapes = [variable.shape for variable in variables]
    dims = (size for shape in shapes for size in shape if isinstance(size, Dim))
    if any(dim.letters - sizes.keys() for dim in dims):
        return None
    return sum(prod(evaluate(size, sizes) for size in shape) for shape in shapes)


def _table_rows(program: Program, sizes: Mapping[str, int]) -> Iterator[TableRows]:
    keys: dict[str, list[Variable]] = {}
    widths: dict[str, int] = {}
    for op in program.root.ops:
        table = str(op.attrs.get("table", ""))  # fluid's look-ups lack it
        if op.type in _LOOK_UPS and table:
            names = op.reads[-1:] if op.type == "table_lookup" else op.reads
            keys.setdefault(table, []).extend(map(program.lookup, names))
            widths[table] = int(str(op.attrs["dim"])) * _ROW_ELEMENT_BYTES
    for table, variables in keys.items():
        yield TableRows(table, widths[table], _elements(variables, sizes))
