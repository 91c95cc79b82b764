"""Replaces unrolled layers by one loop (`jax.scan`)."""

from dataclasses import dataclass, replace

from jaxfleet.analysis.effects import OuterUses
from jaxfleet.errors import PassError
from jaxfleet.ir import Operator, Program
from jaxfleet.ir.inline import embed
from jaxfleet.passes.memory.layer_loop import LayerLoop
from jaxfleet.passes.memory.layer_runs import LayerForms, LayerRun, find_runs
from jaxfleet.passes.memory.layer_stacks import LayerStacks
from jaxfleet.passes.shared.copies import OperatorCopies
from jaxfleet.pipeline import Pass, made_by, register_pass


@register_pass("roll_layers")
@dataclass(frozen=True)
class RollLayers(Pass):
    """Turns consecutive equal groups into one `jax.scan`.

    Groups are the parts between `cut`s; run after `recompute`, which cuts a stack of layers into
    equal groups and recomputes forward, so that a loop keeps only values that cross groups. A run
    is rolled if each group reads values of the one before it, or values from before them all;
    literals may differ. Values that each layer has of its own are stacked: parameters and state are
    unstacked after the loop, saved values stay stacked from the loop of forward to that of
    backward.

    One small executable compiles in the same time whatever the number of layers. The price is the
    memory of stacks: a second copy of all parameters of the layers while a loop runs.

    Before::

        program p
          data  x: f32[4]
          param u: f32[4]
          param v: f32[4]
          param w: f32[4]
          block 0
            forward
              a: f32[4] = jax.mul(x, u)
              cut()
              b: f32[4] = jax.mul(a, v)
              cut()
              c: f32[4] = jax.mul(b, w)
              cut()
              loss: f32[] = jax.reduce_sum(c) {axes=[0]}
            backward
              c@GRAD: f32[4] = jax.exp(c)
              cut()
              w@GRAD: f32[4] = jax.mul(c@GRAD, b) for (w, w@GRAD)
              b@GRAD: f32[4] = jax.mul(c@GRAD, w)
            optimize
              w = jax.sub(w, w@GRAD)
            backward
              cut()
              v@GRAD: f32[4] = jax.mul(b@GRAD, a) for (v, v@GRAD)
              a@GRAD: f32[4] = jax.mul(b@GRAD, v)
            optimize
              v = jax.sub(v, v@GRAD)
            backward
              cut()
              u@GRAD: f32[4] = jax.mul(a@GRAD, x) for (u, u@GRAD)
              x@GRAD: f32[4] = jax.mul(a@GRAD, u)
            optimize
              u = jax.sub(u, u@GRAD)
              fetch(loss)

    After::

        program p
          data  x: f32[4]
          param u: f32[4]
          param v: f32[4]
          param w: f32[4]
          block 0
            forward
              u@LAYERS: f32[3,4] = jax.stack(u, v, w) {axis=0}
              c: f32[4], x@LAYERS: f32[3,4] = jax.scan(x, u@LAYERS) {body=^1, length=3, num_carry=1, num_consts=0, reverse=false, unroll=1}
              cut()
              loss: f32[] = jax.reduce_sum(c) {axes=[0]}
            backward
              c@GRAD: f32[4] = jax.exp(c)
              cut()
              w@LAYERS: f32[3,4] = jax.stack(w, v, u) {axis=0}
              place@LAYERS: i32[3] = jax.iota() {dimension=0, dtype=i32, shape=[3]}
              place@LAYERS~1: i32[3] = jax.iota() {dimension=0, dtype=i32, shape=[3]}
              place@LAYERS~2: i32[3] = jax.sub(2:i32, place@LAYERS~1)
              x@GRAD: f32[4], w@LAYERS~1: f32[3,4] = jax.scan(x@LAYERS, c@GRAD, w@LAYERS, place@LAYERS, place@LAYERS~2) {body=^2, length=3, num_carry=2, num_consts=1, reverse=false, unroll=1} for (w, w@GRAD), (v, v@GRAD), (u, u@GRAD)
            optimize
              w@LAYERS~1.block0: f32[1,4] = jax.slice(w@LAYERS~1) {limit_indices=[1, 4], start_indices=[0, 0]}
              w = jax.squeeze(w@LAYERS~1.block0) {dimensions=[0]}
              w@LAYERS~1.block1: f32[1,4] = jax.slice(w@LAYERS~1) {limit_indices=[2, 4], start_indices=[1, 0]}
              v = jax.squeeze(w@LAYERS~1.block1) {dimensions=[0]}
              w@LAYERS~1.block2: f32[1,4] = jax.slice(w@LAYERS~1) {limit_indices=[3, 4], start_indices=[2, 0]}
              u = jax.squeeze(w@LAYERS~1.block2) {dimensions=[0]}
              fetch(loss)
          block 1 (x@LAYER: f32[4], u@LAYER: f32[4]) -> (a@LAYER, x@LAYER)
            forward
              a@LAYER: f32[4] = jax.mul(x@LAYER, u@LAYER)
          block 2 (x@LAYERS@LAYER: f32[3,4], c@GRAD@LAYER: f32[4], w@LAYERS@LAYER: f32[3,4], place@LAYER: i32[], place@LAYER~1: i32[]) -> (b@GRAD@LAYER, w@LAYER~4)
            backward
              w@LAYER: f32[1,4] = jax.dynamic_slice(w@LAYERS@LAYER, place@LAYER, 0:i32) {slice_sizes=[1, 4]}
              w@LAYER~1: f32[4] = jax.squeeze(w@LAYER) {dimensions=[0]}
              b@LAYER: f32[1,4] = jax.dynamic_slice(x@LAYERS@LAYER, place@LAYER~1, 0:i32) {slice_sizes=[1, 4]}
              b@LAYER~1: f32[4] = jax.squeeze(b@LAYER) {dimensions=[0]}
              w@GRAD@LAYER: f32[4] = jax.mul(c@GRAD@LAYER, b@LAYER~1)
              b@GRAD@LAYER: f32[4] = jax.mul(c@GRAD@LAYER, w@LAYER~1)
            optimize
              w@LAYER~2: f32[4] = jax.sub(w@LAYER~1, w@GRAD@LAYER)
            backward
              w@LAYER~3: f32[1,4] = jax.broadcast_in_dim(w@LAYER~2) {broadcast_dimensions=[1], shape=[1, 4]}
              w@LAYER~4: f32[3,4] = jax.dynamic_update_slice(w@LAYERS@LAYER, w@LAYER~3, place@LAYER, 0:i32)
    """  # noqa: E501  # an operator is one line

    least: int = 3  # the minimum number of groups for a loop

    def run(self, program: Program) -> Program:
        if self.least < 2:
            raise PassError(f"roll_layers: a loop over {self.least} layers is none")
        groups, forms = _groups(program), LayerForms(program)
        if len(groups) < self.least:
            return program
        runs = find_runs([forms.of(group.ops) for group in groups], self.least)
        return _Rolling(self, program, groups, runs).run() if runs else program


@dataclass(frozen=True)
class _Group:
    """The operators between two cuts, and the cut before them."""

    cut: Operator | None
    ops: tuple[Operator, ...]


def _groups(program: Program) -> list[_Group]:
    """Returns the groups of block 0; the final fetches are a group of their own."""
    ops = program.root.ops
    last = max((n for n, op in enumerate(ops) if op.type != "fetch"), default=-1) + 1
    found, group, cut = list[_Group](), list[Operator](), None
    for op in ops[:last]:
        if op.type == "cut":
            found.append(_Group(cut, tuple(group)))
            group, cut = [], op
        else:
            group.append(op)
    return [*found, _Group(cut, tuple(group)), _Group(None, ops[last:])]


@dataclass
class _Rolling:
    pass_: RollLayers
    program: Program
    groups: list[_Group]
    runs: list[LayerRun]

    def __post_init__(self) -> None:
        self.uses, self.copies = OuterUses(self.program), OperatorCopies(self.program)
        self.stacks = LayerStacks(self.program)
        self.last = {
            name: place
            for place, group in enumerate(self.groups)
            for op in group.ops
            for name in self.uses.of(op).reads
        }

    def run(self) -> Program:
        runs, ops, place = {run.first: run for run in self.runs}, list[Operator](), 0
        while place < len(self.groups):
            cut, run = self.groups[place].cut, runs.get(place)
            ops += [cut] if cut is not None else []
            ops += self._as_they_are(place) if run is None else self._rolled(run)
            place = place + 1 if run is None else run.end
        root = self.program.root.with_ops(ops, declare=self.stacks.declared.values())
        inner = (*self.program.blocks[1:], *self.copies.blocks)
        made = replace(self.program, blocks=(root, *inner))
        made = _without_lost_blocks(made)
        inside = {x for b in made.blocks[1:] for op in b.ops for x in (*op.reads, *op.writes)}
        return made.with_block(made.root.without_unused(keep=inside))

    def _as_they_are(self, place: int) -> list[Operator]:
        """Returns a group's operators, preceded by those that unstack their inputs."""
        found = list[Operator]()
        for op in self.groups[place].ops:
            used = self.uses.of(op)
            for out in self.stacks.needed(sorted(used.reads)):
                found.append(made_by(replace(out, role=op.role, source=op.source), self.pass_))
            self.stacks.forget(used.writes)
            found.append(op)
        return found

    def _rolled(self, run: LayerRun) -> list[Operator]:
        def is_live(name: str) -> bool:
            lasts = self.program.lookup(name).kind.persistable
            return lasts or self.last.get(name, -1) >= run.end

        loop = LayerLoop(run, self.stacks, self.copies, is_live)
        return [made_by(op, self.pass_) for op in loop.ops()]


def _without_lost_blocks(program: Program) -> Program:
    made = embed(program, index=0, inner_from=1, parent=-1, names={}, sizes={})
    return replace(program, variables=made.variables, blocks=(made.root, *made.inner))
