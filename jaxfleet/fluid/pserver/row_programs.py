"""Makes a trainer compute with the rows of tables that a batch needs, in the place of tables.

A table that servers hold in slices is to a trainer what the ids of a batch ask for: before a run
the rows of all ids, each once, come as `emb@ROWS`, f32[u,dim], and each array of ids becomes one of
places in it, `ids@PLACES@emb`. The operators stay what they were, look-ups and their gradients, so
the gradient of a table is that of `emb@ROWS`, summed over equal ids by the operator itself. `u` is
padded to a power of two, so that few programs are compiled. A place of -1 is an id that the table
lacks: its row is NaN and has no gradient, as in one process. Of the distributed table it is the
same, but that its ids may be any, and servers divide them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxfleet.analysis.slices import Slice, slices_of
from jaxfleet.errors import ProgramError
from jaxfleet.fluid.program import Program as FluidProgram
from jaxfleet.fluid.transpiler.table_spec import SPECS
from jaxfleet.ir import Attrs, Kind, Operands, Operator, Program, Variable
from jaxfleet.ir.dims import letter
from jaxfleet.ir.names import trainer_of
from jaxfleet.tables import TableSpec

LOOK_UP = "distributed_lookup_table"
SEND_ROWS = "send_rows"  # ours, of plain programs alone: the rows of a gradient to who holds them
PADDING = (1 << 31) - 1  # the place of an id whose row is zeros
_MERGE = "merge_ids"  # the last of what looks a distributed table up
_ASKS = frozenset({"split_ids", "prefetch"})
_SPLITS = frozenset({"split_selected_rows", "split_ids"})
_GRADIENTS = frozenset({"lookup_table_grad", "lookup_table_v2_grad"})


@dataclass(frozen=True)
class Part:
    """Rows of a table that one server holds.

    Attributes:
        name: of the slice.
        gradient: what its gradient is called on the way.
        endpoint: the server's.
        start: its first row.
        rows: how many it has.
    """

    name: str
    gradient: str
    endpoint: str
    start: int
    rows: int


@dataclass(frozen=True)
class RowTable:
    """A table whose rows a trainer asks for.

    Attributes:
        name: its own.
        rows: the variable that holds the rows of a batch.
        places: by what is fed as ids, the variable that says where their rows are.
        padding: the id whose row is zeros; -1 for none.
        gradient: of the rows.
        parts: in the order of rows; none where servers divide ids by themselves.
        dim: elements of a row.
        spec: what it is, where ids may be any.
    """

    name: str
    rows: str
    places: Mapping[str, str]
    padding: int
    gradient: str
    parts: tuple[Part, ...]
    dim: int
    spec: TableSpec | None = None

    def has(self, ids: np.ndarray) -> np.ndarray:
        """Tells which ids have rows."""
        if self.spec is not None:
            return np.ones(ids.shape, np.bool_)
        height = sum(part.rows for part in self.parts)
        return (ids >= 0) & (ids < height)


def with_rows(program: Program) -> tuple[Program, tuple[RowTable, ...]]:
    """Returns a trainer's program that computes with rows, and the tables that they are of."""
    tables: list[RowTable] = []
    for op in [op for op in program.root.ops if op.type in {LOOK_UP, _MERGE}]:
        program, table = _OneTable(program, op).run()
        tables.append(table)
    return program, tuple(tables)


def ids_of_any_size(program: FluidProgram) -> frozenset[str]:
    """Returns what is fed and goes to servers as it is, since a table has any int64 ids."""
    found: set[str] = set()
    others: set[str] = set()
    for op in program.global_block().ops:
        if op.type == _MERGE:
            found.update(op.input("Ids"))
        elif op.type not in {*_ASKS, *_GRADIENTS}:
            others.update(op.input_arg_names)
    return frozenset(found - others)


def distributed_tables(program: Program) -> tuple[TableSpec, ...]:
    """Returns what the distributed tables of a program are."""
    texts = program.attrs.get(SPECS, ())
    assert isinstance(texts, tuple)
    return tuple(TableSpec.from_text(str(text)) for text in texts)


@dataclass
class _OneTable:
    """Rewrites the look-ups of one table.

    Attributes:
        program: as it is so far.
        lookup: the operator that asks for rows.
    """

    program: Program
    lookup: Operator

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
        self.sparse: set[str] = set()  # gradients that have the rows of the batch

    @property
    def is_distributed(self) -> bool:
        """Whether it is the distributed table: servers divide its ids, which may be any."""
        return self.lookup.type == _MERGE

    @property
    def gradients(self) -> list[Operator]:
        """The operators that make gradients of it."""
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
        """Tells whether an operator cuts or sends the gradient."""
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

    def _sent(self, ops: Sequence[Operator]) -> tuple[str, tuple[Part, ...]]:
        """Returns the gradient that is sent, and who gets which rows of it."""
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
        """Returns the program with other operators, and what is fed to them declared."""
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


def _part(cut: Slice, sent: str, endpoint: str) -> Part:
    gradient = sent if trainer_of(sent) is None else sent.rpartition(".")[0]
    return Part(cut.name, gradient, endpoint, cut.start, cut.rows)


def _plain(name: str) -> str:
    """Returns a name as a size may have one."""
    return "".join(c if c.isalnum() else "_" for c in name)
