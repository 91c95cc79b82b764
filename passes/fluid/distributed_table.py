"""Distributed tables in fluid's dialect: rows by index modulo servers, and their prefetch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jaxfleet.analysis.placement.sliced_layout import placement_of, slices_of
from jaxfleet.analysis.updates import Updates, is_fluid_dialect, looks_up
from jaxfleet.errors import PassError
from jaxfleet.ir import (
    Attr,
    Attrs,
    Block,
    Kind,
    Operand,
    Operands,
    Operator,
    Program,
    Role,
    Variable,
    trainer_name,
)
from jaxfleet.passes.fluid.job import FluidJob, Messages
from jaxfleet.passes.pserver.job import Mark
from jaxfleet.pipeline import Pass, made_by, register_pass

_ASKED, _ANSWERED = "prefetch_compress_in_tmp_", "prefetch_compress_out_tmp_"


@dataclass(frozen=True)
class Table:
    """The distributed table of a program, its parameter, and its rows' gradient."""

    fluid: FluidJob
    name: str
    gradient: str

    @classmethod
    def of(cls, fluid: FluidJob) -> "Table | None":
        """Returns a program's table, None if it has none; rejects several or differing look-ups."""
        updates = fluid.updates
        tables = sorted(updates.tables)
        if not tables:
            return None
        if len(tables) > 1:
            what = f"{', '.join(tables)} are distributed tables, and there can be one"
            raise PassError(what, hint="use is_sparse=True for the others")
        for op in updates.program.root.ops:
            if looks_up(op, tables[0]) and not op.attrs.get("is_distributed"):
                what = f"a look-up of the distributed table '{tables[0]}' lacks is_distributed"
                raise PassError(what, op=op)
        gradient = next((g for p, g in updates.all_pairs if p == tables[0]), None)
        if gradient is None:
            raise PassError(f"nothing updates the distributed table '{tables[0]}'")
        return cls(fluid, tables[0], gradient)

    @property
    def rows(self) -> int:
        """The rows per server; the last server may have fewer."""
        rows, servers = self.fluid.updates.variable(self.name).shape[0], self._servers
        assert isinstance(rows, int)
        return -(-rows // servers)

    @property
    def _servers(self) -> int:
        return len(self.fluid.job.endpoints)

    # --- trainers ----------------------------------------------------------------------------

    def asks(self, ops: Sequence[Operator], messages: Messages) -> list[Operator]:
        """Returns a trainer's operators with one request for all look-ups in place of the first."""
        lookups = [op for op in ops if looks_up(op, self.name)]
        ids = [str(name) for op in lookups for name in op.inputs.slot("Ids")]
        rows = [str(name) for op in lookups for name in op.outputs.slot("Out")]
        asked, answered = self._names(_ASKED), self._names(_ANSWERED)
        variable = self.fluid.updates.variable
        for name, like in ((n, ids[0]) for n in asked):
            messages.declared[name] = replace(variable(like), name=name, kind=Kind.TEMP)
        for name in answered:
            messages.declared[name] = replace(variable(rows[0]), name=name, kind=Kind.TEMP)
        epmap: dict[str, Attr] = {"epmap": self.fluid.job.endpoints}
        made = [
            _op("split_ids", {"Ids": ids}, {"Out": asked}),
            _op("prefetch", {"X": asked}, {"Out": answered}, epmap, Role.RPC),
            _op("merge_ids", {"Ids": ids, "Rows": asked, "X": answered}, {"Out": rows}),
        ]
        at = ops.index(lookups[0])
        rest = [op for op in ops if op not in lookups]
        return [*rest[:at], *(messages.mark(op) for op in made), *rest[at:]]

    def sends(self, trainer_id: int, control: str, messages: Messages) -> list[Operator]:
        """Returns the operators that send a trainer's gradient, to each server its rows."""
        names = [f"{self._own(trainer_id)}.pserver_{n}" for n in range(self._servers)]
        like = self.fluid.updates.variable(self.gradient)
        for name in names:
            messages.declared[name] = replace(like, name=name, kind=Kind.TEMP)
        attrs: dict[str, Attr] = {"epmap": self.fluid.job.endpoints, "trainer_id": trainer_id}
        pair = ((self.name, self.gradient),)
        cut = _op("split_ids", {"Ids": [self.gradient]}, {"Out": names}, role=Role.DIST)
        return [messages.mark(cut), messages.rpc("send", names, [control], attrs, pair)]

    def _own(self, trainer_id: int) -> str:
        is_own = self.fluid.exchange.mode == "sync" and self.fluid.job.trainers > 1
        return trainer_name(self.gradient, trainer_id) if is_own else self.gradient

    def _names(self, prefix: str) -> list[str]:
        return [f"{prefix}{number}" for number in range(self._servers)]

    # --- servers -----------------------------------------------------------------------------

    def buffers(self, server: int) -> list[str]:
        """Returns the names of the received gradients of a server's rows."""
        trainers = range(self.fluid.job.trainers if self.fluid.merges else 1)
        return [f"{self._own(trainer)}.pserver_{server}" for trainer in trainers]

    def variables(self, server: int) -> list[Variable]:
        """Returns a server's variables for the table, without the learning rate."""
        updates = self.fluid.updates
        held = updates.variable(self.name)
        table = replace(held, shape=(self.rows, *held.shape[1:]), kind=Kind.PARAM)
        like = updates.variable(self.gradient)
        sent = [replace(like, name=name, kind=Kind.DATA) for name in self.buffers(server)]
        merged = [replace(like, kind=Kind.STATE)] if self.fluid.merges else []
        asked = replace(updates.variable(self._some_ids), name=f"{_ASKED}{server}", kind=Kind.DATA)
        answered = replace(asked, name=f"{_ANSWERED}{server}", dtype=held.dtype, kind=Kind.DATA)
        shape = (*asked.shape, *held.shape[1:])
        return [table, *sent, *merged, asked, replace(answered, shape=shape)]

    def blocks(self, server: int, first: int, parent: int, mark: Mark) -> list[Block]:
        """Returns the blocks of a server that update its rows, look them up, and save them.

        Received gradients are summed, not divided by the number of trainers, as in fluid.
        """
        update = next(op for op in self.fluid.updates.of(self.name) if op.inputs.slot("Param"))
        (rate,) = update.inputs.slot("LearningRate")
        buffers = self.buffers(server)
        gradient = self.gradient if self.fluid.merges else buffers[0]
        pair = ((self.name, gradient),)
        ops = []
        if self.fluid.merges:
            added = _op("sum", {"X": buffers}, {"Out": [gradient]}, role=Role.OPTIMIZE)
            ops.append(replace(added, role_var=pair))
        read = {"Grad": [gradient], "LearningRate": [str(rate)], "Param": [self.name]}
        updated = _op("sgd", read, {"ParamOut": [self.name]}, role=Role.OPTIMIZE)
        ops.append(replace(updated, role_var=pair, source=update.source))
        found = _op(
            "lookup_sparse_table",
            {"Ids": [f"{_ASKED}{server}"], "W": [self.name]},
            {"Out": [f"{_ANSWERED}{server}"]},
            {"is_distributed": True, "is_sparse": True, "padding_idx": -1},
            Role.RPC,
        )
        saved = _op("save", {"X": [self.name]}, {}, {"file_path": "none"}, Role.RPC)
        return [
            Block(first, parent, ops=tuple(map(mark, ops))),
            Block(first + 1, first, ops=(mark(found),)),
            Block(first + 2, first, ops=(mark(saved),)),
        ]

    def facts(self, server: int, first: int) -> dict[str, Attr]:
        """Returns the attributes of `listen_and_serv` for a server's blocks."""
        return {
            "checkpint_block_id": first + 2,
            "prefetch_var_name_to_block_id": (f"{_ASKED}{server}:{first + 1}",),
        }

    @property
    def _some_ids(self) -> str:
        ops = self.fluid.updates.program.root.ops
        return next(str(op.inputs.slot("Ids")[0]) for op in ops if looks_up(op, self.name))


def _op(
    op_type: str,
    read: Mapping[str, Sequence[str]],
    written: Mapping[str, Sequence[str]],
    attrs: Mapping[str, Attr] | None = None,
    role: Role = Role.FORWARD,
) -> Operator:
    ins, outs = Operands.named(**read), Operands.named(**written)
    return Operator(op_type, ins, outs, Attrs(attrs or {}), role)


@register_pass("prefetch_rows")
@dataclass(frozen=True)
class PrefetchRows(Pass):
    """Replaces the look-ups of each sparse table by one request to the servers that hold it.

    All look-ups of a table become one `distributed_lookup_table`, after the last operator that
    makes any of their keys, since a request costs more than its response. A trainer holds no such
    table: it never receives one.

    Before::

        program p.trainer0 {dialect="fluid", endpoints=["s:1", "s:2"], placement=[["t.block0", "s:1"], ["t.block1", "s:2"]], role="trainer", slices=[["t", [3, 2]]], trainers=2}
          data  ids: i32[b]
          param t: f32[5,4]
          block 0
            forward
              Out=rows: f32[b,4] = lookup_table_v2(Ids=ids, W=t) {is_sparse=true, padding_idx=-1}
              Out=loss: f32[1] = mean(X=rows)

    After::

        program p.trainer0 {dialect="fluid", endpoints=["s:1", "s:2"], placement=[["t.block0", "s:1"], ["t.block1", "s:2"]], role="trainer", slices=[["t", [3, 2]]], trainers=2}
          data  ids: i32[b]
          param t: f32[5,4]
          block 0
            forward
              Outputs=rows: f32[b,4] = distributed_lookup_table(Ids=ids, W=t) {endpoints=["s:1", "s:2"], height_sections=[3, 2], lookup_table_version="lookup_table_v2", padding_idx=-1, table_names=["t.block0", "t.block1"], trainer_id=0}
              Out=loss: f32[1] = mean(X=rows)
    """  # noqa: E501  # a program's attributes are one line

    trainer_id: int = 0

    runs_after = ("insert_send_recv",)

    def run(self, program: Program) -> Program:
        if not is_fluid_dialect(program) or program.attrs.get("role") != "trainer":
            return program
        ops = list(program.root.ops)
        for table in sorted(Updates(program).prefetched):
            ops = self._with_one_lookup(program, ops, table)
        return program.with_block(program.root.with_ops(ops))

    def _with_one_lookup(
        self, program: Program, ops: Sequence[Operator], table: str
    ) -> list[Operator]:
        lookups = [op for op in ops if looks_up(op, table)]
        ids = [name for op in lookups for name in op.inputs.slot("Ids")]
        rows = [name for op in lookups for name in op.outputs.slot("Out")]
        rest = [op for op in ops if op not in lookups]
        made = [place for place, op in enumerate(rest) if not set(ids).isdisjoint(op.writes)]
        at = max(made, default=-1) + 1
        early = [op for op in rest[:at] if not set(rows).isdisjoint(op.reads)]
        if early:
            what = f"the rows of '{table}' that one look-up gives decide what another asks for"
            raise PassError(what, op=early[0], hint="use a table of its own for each")
        rest.insert(at, made_by(self._lookup(program, lookups[0], table, ids, rows), self))
        return rest

    def _lookup(
        self,
        program: Program,
        first: Operator,
        table: str,
        ids: Sequence[Operand],
        rows: Sequence[Operand],
    ) -> Operator:
        cuts = [cut for cut in slices_of(program) if cut.param == table]
        placement = placement_of(program)
        attrs: dict[str, Attr] = {
            "endpoints": tuple(placement[cut.name] for cut in cuts),
            "height_sections": tuple(cut.rows for cut in cuts),
            "lookup_table_version": first.type,
            "padding_idx": first.attrs.get("padding_idx", -1),
            "table_names": tuple(cut.name for cut in cuts),
            "trainer_id": self.trainer_id,
        }
        return Operator(
            "distributed_lookup_table",
            Operands.named(Ids=ids, W=table),
            Operands.named(Outputs=rows),
            Attrs(attrs),
            first.role,
            source=first.source,
        )
