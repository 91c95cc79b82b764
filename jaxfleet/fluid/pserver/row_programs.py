"""Rewrite of a trainer's program to compute with the table rows that a batch needs.

Of a table in slices on servers, a trainer sees only the rows of a batch's ids: before a run the
rows of the unique ids are received as `emb@ROWS`, f32[u,dim], and each array of ids is replaced by
one of places in it, `ids@PLACES@emb`. Lookups and their gradients stay unchanged, so the gradient
of a table is that of `emb@ROWS`, summed over equal ids by the operator itself. `u` is padded to a
power of two, so that few programs are compiled. A place of -1 is an id that the table lacks: its
row is NaN and has no gradient, as in one process. The distributed table works the same way, but
accepts any id, and servers partition the ids.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxfleet.analysis.placement.sliced_layout import Slice, slices_of
from jaxfleet.errors import ProgramError
from jaxfleet.fluid.framework.program import Program as FluidProgram
from jaxfleet.fluid.transpiler.pserver_job import SPECS
from jaxfleet.ir import Attrs, Kind, Operands, Operator, Program, Variable
from jaxfleet.ir.dims import letter
from jaxfleet.ir.naming import trainer_of
from jaxfleet.tables import TableSpec

LOOK_UP = "distributed_lookup_table"
SEND_ROWS = "send_rows"  # ours, only in normalized programs: sends rows of a gradient to servers
PADDING = (1 << 31) - 1  # the place of an id whose row is zeros
_MERGE = "merge_ids"  # the last operator of a lookup in a distributed table
_ASKS = frozenset({"split_ids", "prefetch"})
_SPLITS = frozenset({"split_selected_rows", "split_ids"})
_GRADIENTS = frozenset({"lookup_table_grad", "lookup_table_v2_grad"})


@dataclass(frozen=True)
class TablePart:
    """The rows of a table on one server."""

    name: str  # of the slice
    gradient: str  # the name of its gradient in messages
    endpoint: str  # the server's
    start: int  # its first row
    rows: int  # the number of rows


@dataclass(frozen=True)
class RowTable:
    """A table whose rows a trainer requests."""

    name: str  # the table's
    rows: str  # the variable with the rows of a batch
    places: Mapping[str, str]  # the variable with the places of ids, by the variable with the ids
    padding: int  # the id whose row is zeros; -1 for none
    gradient: str  # of the rows
    parts: tuple[TablePart, ...]  # in the order of rows; empty if servers partition the ids
    dim: int  # elements of a row
    spec: TableSpec | None = None  # the specification of a table with arbitrary ids

    def has(self, ids: np.ndarray) -> np.ndarray:
        """Whether each id has a row."""
        if self.spec is not None:
            return np.ones(ids.shape, np.bool_)
        height = sum(part.rows for part in self.parts)
        return (ids >= 0) & (ids < height)


def with_rows(program: Program) -> tuple[Program, tuple[RowTable, ...]]:
    """Returns a trainer's program that computes with rows, and their tables."""
    tables: list[RowTable] = []
    for op in [op for op in program.root.ops if op.type in {LOOK_UP, _MERGE}]:
        program, table = _OneTable(program, op).run()
        tables.append(table)
    return program, tuple(tables)


def ids_of_any_size(program: FluidProgram) -> frozenset[str]:
    """Returns the fed variables sent to servers without narrowing, as tables accept any int64."""
    found: set[str] = set()
    others: set[str] = set()
    for op in program.global_block().ops:
        if op.type == _MERGE:
            found.update(op.input("Ids"))
        elif op.type not in {*_ASKS, *_GRADIENTS}:
            others.update(op.input_arg_names)
    return frozenset(found - others)


def distributed_tables(program: Program) -> tuple[TableSpec, ...]:
    """Returns the specifications of a program's distributed tables."""
    texts = program.attrs.get(SPECS, ())
    assert isinstance(texts, tuple)
    return tuple(TableSpec.from_text(str(text)) for text in texts)


@dataclass
class _OneTable:
    """Rewrites the lookups of one table."""

    program: Program  # the program, partly rewritten
    lookup: Operator  # the operator that requests rows

    def __post_init__(self) -> None:
        self.spec: TableSpec | None = None
        if self.is_distributed:
            (self.spec,) = distributed_tables(self.program)
        self.name = str(self.lookup.inputs.slot("W")[0]) if self.spec is None else self.spec.name
        self.table = self.program.lookup(self.name)
        self.ids = tuple(dict.fromkeys(map(str, self.lookup.inputs.slot("Ids"))))
        self.rows = f"{self.name}@ROWS"
        self.places = {ids: f"{ids}@PLACES@{self.name}" for ids in self.ids}
        said = self.gradients[0] if self.is_distributed else self.lookup
        padding = said.attrs.get("padding_idx", -1)
        assert isinstance(padding, int)
        self.padding = padding
        self.sparse: set[str] = set()  # gradients with one row for each row of the batch

    @property
    def is_distributed(self) -> bool:
        """Whether it is a distributed table: servers partition its ids, which may be any."""
        return self.lookup.type == _MERGE

    @property
    def gradients(self) -> list[Operator]:
        """The operators that compute gradients of the table."""
        ops = self.program.root.ops
        return [op for op in ops if op.type in _GRADIENTS and op.inputs.slot("W") == (self.name,)]

    def run(self) -> tuple[Program, RowTable]:
        ops = [made for op in self.program.root.ops for made in self._made(op)]
        dim = self.table.shape[1]
        assert isinstance(dim, int)
        ops = [op for op in ops if not (self.is_distributed and op.type in _ASKS and
                                        self.sparse.isdisjoint(op.reads))]  # fmt: skip
        gradient, parts = self._sent(ops)
        kept = [op for op in ops if not self._sends(op)]
        at = next(i for i, op in enumerate(ops) if self._sends(op))
        at = sum(not self._sends(op) for op in ops[:at])
        kept.insert(at, Operator(SEND_ROWS, Operands.named(X=gradient), role=self.lookup.role))
        found = RowTable(
            self.name, self.rows, self.places, self.padding, gradient, parts, dim, self.spec
        )
        return self._declared(kept), found

    # --- operators -----------------------------------------------------------------------------

    def _made(self, op: Operator) -> Iterator[Operator]:
        if op is self.lookup:
            yield from self._lookups()
            return
        if op.type in _GRADIENTS and op.inputs.slot("W") == (self.name,):
            op = self._gradient(op)
            self.sparse.update(op.writes)
        elif not self.sparse.isdisjoint(op.reads):
            self.sparse.update(name for name in op.writes if self._is_like_the_table(name))
        yield op

    def _lookups(self) -> Iterator[Operator]:
        said = self.lookup.attrs.get("lookup_table_version", "lookup_table_v2")
        version = self.gradients[0].type.removesuffix("_grad") if self.is_distributed else str(said)
        attrs = Attrs({"is_sparse": True, "padding_idx": PADDING if self.padding >= 0 else -1})
        for ids, out in zip(self.lookup.inputs.slot("Ids"), self.lookup.writes, strict=True):
            read = Operands.named(Ids=self.places[str(ids)], W=self.rows)
            yield replace(
                self.lookup, type=version, inputs=read, outputs=Operands.named(Out=out), attrs=attrs
            )

    def _gradient(self, op: Operator) -> Operator:
        own = op.attrs.get("padding_idx", -1)
        if own != self.padding:
            what = f"look-ups of '{self.name}' have padding_idx {self.padding} and {own}"
            raise ProgramError(what, op=op, hint="give all look-ups of a sparse table the same one")
        (ids,) = map(str, op.inputs.slot("Ids"))
        names = {self.name: self.rows, ids: self.places[ids]}
        attrs = op.attrs.updated(padding_idx=PADDING if self.padding >= 0 else -1)
        return replace(op, inputs=op.inputs.renamed(names), attrs=attrs)

    def _is_like_the_table(self, name: str) -> bool:
        return self.program.lookup(name).shape == self.table.shape

    def _sends(self, op: Operator) -> bool:
        """Whether an operator splits or sends the gradient."""
        if op.type in _SPLITS:
            return op.reads[0] in self.sparse
        return op.type == "send" and (op.reads[0] in self.sparse or op.reads[0] in self._cuts)

    @property
    def _cuts(self) -> frozenset[str]:
        ops = self.program.root.ops
        return frozenset(
            name
            for op in ops
            if op.type in _SPLITS and op.reads[0] in self.sparse
            for name in op.writes
        )

    def _sent(self, ops: Sequence[Operator]) -> tuple[str, tuple[TablePart, ...]]:
        """Returns the sent gradient, and the parts of the table that receive its rows."""
        cuts = [cut for cut in slices_of(self.program) if cut.param == self.name]
        split = next((op for op in ops if op.type in _SPLITS and self._sends(op)), None)
        send = next((op for op in ops if op.type == "send" and self._sends(op)), None)
        if send is None:
            what = f"nothing sends the gradient of '{self.name}'"
            raise ProgramError(what, op=self.lookup, hint="transpile the program again")
        gradient = (split or send).reads[0]
        if self.is_distributed:
            return gradient, ()
        names, epmap = send.attrs.get("send_varnames") or send.reads, send.attrs["epmap"]
        assert isinstance(names, tuple)
        assert isinstance(epmap, tuple)
        return gradient, tuple(
            _part(cut, str(name), str(endpoint))
            for cut, name, endpoint in zip(cuts, names, epmap, strict=True)
        )

    # --- variables -----------------------------------------------------------------------------

    def _declared(self, ops: Sequence[Operator]) -> Program:
        """Returns the program with new operators and declarations of their inputs."""
        program = self.program
        shape = (letter(f"u_{_plain(self.name)}"), *self.table.shape[1:])
        fed = {self.rows: replace(self.table, name=self.rows, shape=shape, kind=Kind.DATA)}
        for ids, places in self.places.items():
            like = program.lookup(ids)
            fed[places] = replace(like, name=places, dtype="i32", kind=Kind.DATA)
        own = {n: self._resized(v, shape) for n, v in program.root.variables.items()}
        root = replace(program.root, variables=own, ops=()).with_ops(ops)
        top = {n: self._resized(v, shape) for n, v in program.variables.items()}
        return replace(program, variables={**top, **fed}).with_block(root)

    def _resized(self, variable: Variable, shape: tuple[object, ...]) -> Variable:
        if variable.name not in self.sparse:
            return variable
        return replace(variable, shape=shape)  # type: ignore[arg-type]


def _part(cut: Slice, sent: str, endpoint: str) -> TablePart:
    gradient = sent if trainer_of(sent) is None else sent.rpartition(".")[0]
    return TablePart(cut.name, gradient, endpoint, cut.start, cut.rows)


def _plain(name: str) -> str:
    """Returns a name in the form allowed in a size."""
    return "".join(c if c.isalnum() else "_" for c in name)
