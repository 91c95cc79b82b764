"""Fetch rows of sparse tables from servers, where a trainer's program looks them up."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxfleet.analysis.slices import placement_of, slices_of
from jaxfleet.analysis.updates import Updates, looks_up, says_by_roles
from jaxfleet.errors import PassError
from jaxfleet.ir import Attr, Attrs, Operand, Operands, Operator, Program
from jaxfleet.pipeline import Pass, made_by, register_pass


@register_pass("prefetch_rows")
@dataclass(frozen=True)
class PrefetchRows(Pass):
    """Replaces the look-ups of each sparse table by one that asks the servers that hold it.

    All look-ups of a table become one `distributed_lookup_table`, behind the last operator that
    makes any of their numbers, since a question costs more than an answer. A trainer holds no
    such table: it never receives one.

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
        if not says_by_roles(program) or program.attrs.get("role") != "trainer":
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
