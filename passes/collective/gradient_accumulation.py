"""Gradient accumulation: several calls add up their gradients before one update."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxfleet.analysis.flow import OuterUses
from jaxfleet.errors import PassError
from jaxfleet.ir import (
    Attr,
    Block,
    Kind,
    Operand,
    Operator,
    Program,
    Role,
    Variable,
)
from jaxfleet.ir.inline import with_block_numbers
from jaxfleet.ir.naming import unique
from jaxfleet.passes.building_blocks import (
    check_gradients_are_known,
    conditional,
    identity_block,
    literal,
    periodic_condition,
    update_op,
    with_extra_variables,
)
from jaxfleet.pipeline import Pass, made_by, register_pass

_BODY = 2  # index of the branch; block 1 is the identity


@dataclass(frozen=True)
class UpdateBlocks:
    """An update as a branch: the program with its two blocks, and the names that it rewrites."""

    program: Program
    names: tuple[str, ...]
    blocks: tuple[int, int]


@dataclass
class UpdateBranch:
    """Moves the operators of an update into a block of their own, in single-assignment form.

    A variable's input value is `w@GIVEN`, its new value `w@NEW`.
    """

    program: Program
    sums: Mapping[str, Variable]  # for each gradient, the variable that holds its sum
    late: Mapping[str, Variable]  # for each fetched value of the update, the variable that holds it
    every: int  # the number of gradients in a sum
    variables: dict[str, Variable] = field(default_factory=dict)
    current: dict[str, str] = field(default_factory=dict)
    given: dict[str, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)

    def run(self, update: Sequence[Operator]) -> UpdateBlocks:
        self.taken = {*self.program.variables}
        self.taken |= {name for block in self.program.blocks for name in block.variables}
        ops = [self._mean(gradient) for gradient in self.sums]
        for each in update:
            self._check_inner(each)
            inputs = each.inputs.replaced([self._operand(x) for x in each.inputs])
            outputs = each.outputs.replaced([self._written(x) for x in each.writes])
            ops.append(_shifted(replace(each, inputs=inputs, outputs=outputs)))
        changed = [x for x in self.current if x in self.program.variables]
        results: dict[str, Operand] = {x: self._complete(x, ops) for x in changed}
        results |= {v.name: self._zero(v, ops) for v in self.sums.values()}
        results |= {v.name: self.current[x] for x, v in self.late.items()}
        for name in results:
            self._given(name)
        names = tuple(self.given)
        last = tuple(results.get(name, self.given[name]) for name in names)
        args = tuple(self.given[name] for name in names)
        body = Block(_BODY, 0, self.variables, args, tuple(ops), last)
        return UpdateBlocks(self._program(body, update), names, (1, _BODY))

    def _program(self, body: Block, update: Sequence[Operator]) -> Program:
        moved = {index + _BODY for each in update for index in each.blocks}
        others = [_moved(block, moved) for block in self.program.blocks]
        own = {x for x in self.variables if x in self.program.root.variables}
        kept = {n: v for n, v in others[0].variables.items() if n not in own}
        root = replace(others[0], variables=kept)
        still = identity_block([(x, self._like(x)) for x in self.given])
        return replace(self.program, blocks=(root, still, body.without_unused(), *others[1:]))

    def _mean(self, gradient: str) -> Operator:
        variable = self.program.lookup(gradient)
        pairs = [pair for x in self.program.root.ops for pair in x.role_var if pair[1] == gradient]
        self.variables[gradient] = variable
        self.current[gradient] = gradient
        total = self._given(self.sums[gradient].name)
        mean = update_op("jax.div", (total, literal(self.every, variable.dtype)), (gradient,))
        return replace(mean, role_var=tuple(dict.fromkeys(pairs)))

    def _operand(self, operand: Operand) -> Operand:
        if not isinstance(operand, str):
            return operand
        if operand in self.current:
            return self.current[operand]
        known = self.program.variables.get(operand)
        return operand if known is not None and known.kind is Kind.CONST else self._given(operand)

    def _given(self, name: str) -> str:
        if name not in self.given:
            self.given[name] = self._declared(name, "GIVEN")
        return self.given[name]

    def _written(self, name: str) -> str:
        if name in self.program.root.variables and name not in self.late:
            self.variables[name] = self.program.lookup(name)
            self.current[name] = name
        else:
            self.current[name] = self._declared(name, "NEW")
        return self.current[name]

    def _complete(self, name: str, ops: list[Operator]) -> Operand:
        """Returns a variable's new value; parameters are made whole on every device."""
        value = self.current[name]
        if self.program.variables[name].kind is not Kind.PARAM:
            return value
        whole = self._declared(name, "WHOLE")
        ops.append(update_op("c_complete", (value,), (whole,)))
        return whole

    def _zero(self, variable: Variable, ops: list[Operator]) -> Operand:
        zero = literal(0, variable.dtype)
        if not variable.shape:
            return zero
        name, shape = self._declared(variable.name, "ZERO"), variable.shape
        attrs: dict[str, Attr] = {"broadcast_dimensions": (), "shape": shape}
        ops.append(update_op("jax.broadcast_in_dim", (zero,), (name,), **attrs))
        return name

    def _declared(self, name: str, suffix: str) -> str:
        new = unique(f"{name}@{suffix}", self.taken)
        self.taken.add(new)
        like = self._like(name)
        self.variables[new] = Variable(new, like.dtype, like.shape)
        return new

    def _like(self, name: str) -> Variable:
        known = {v.name: v for v in (*self.sums.values(), *self.late.values())}
        return known.get(name) or self.program.lookup(name)

    def _check_inner(self, each: Operator) -> None:
        if not each.blocks:
            return
        inner = OuterUses(self.program).of(each).reads - set(each.reads)
        outer = [x for x in inner if self.program.lookup(x).kind is not Kind.CONST]
        if outer:
            what = f"merge: a block of the update reads '{outer[0]}' past its arguments"
            raise PassError(what, op=each, hint="leave merge out")


def _shifted(each: Operator) -> Operator:
    """Returns an operator with its blocks renumbered to follow the branch's two."""
    return with_block_numbers(each, lambda index: index + _BODY)


def _moved(block: Block, inside: set[int]) -> Block:
    """Returns a block at its new index; blocks that the update runs move inside the branch."""
    if not block.index:
        return block.with_ops(map(_shifted, block.ops))
    index = block.index + _BODY
    parent = _BODY if index in inside else block.parent + _BODY if block.parent else 0
    return replace(block, index=index, parent=parent).with_ops(map(_shifted, block.ops))


_UPDATE = frozenset({Role.OPTIMIZE, Role.OPTIMIZE_LR_SCHED, Role.LR_SCHED})
_NAME = "merge"
_CALLS = f"{_NAME}.calls"  # calls since the last update


@register_pass("merge_gradients")
@dataclass(frozen=True)
class MergeGradients(Pass):
    """Applies the update at every `every`-th call, on the mean of the calls' gradients.

    Each call computes forward and backward unchanged; its gradients are added to sums that the step
    keeps between calls. The update is a branch that runs at every `every`-th call, on the sums
    divided by `every`: like `optax.MultiSteps`, and for a mean loss equal to one call with all
    rows. Metrics that the update computes are those of the last update, zeros before the first.

    On several devices a sum stays local to each device (`sums`), so gradients are reduced once per
    update. Runs before `grad_allreduce`, which handles that.

    Before::

        program p {batch=<b>}
          data  x: f32[b,4]
          param w: f32[4]
          block 0
            backward
              w@GRAD: f32[4] = jax.reduce_sum(x) {axes=[0]} for (w, w@GRAD)
            optimize
              w = jax.sub(w, w@GRAD)

    After::

        program p {batch=<b>, beside=[["merge.calls", 0], ["w@GRAD@MERGED", 0.0]], sums=["w@GRAD@MERGED"]}
          data  x: f32[b,4]
          param w: f32[4]
          state merge.calls: i32[]
          state w@GRAD@MERGED: f32[4]
          block 0
            backward
              w@GRAD@CALL: f32[4] = jax.reduce_sum(x) {axes=[0]}
            optimize
              w@GRAD@MERGED = jax.add(w@GRAD@MERGED, w@GRAD@CALL)
              merge.more: i32[] = jax.add(merge.calls, 1:i32)
              merge.due: bool[] = jax.ge(merge.more, 4:i32)
              merge.index: i32[] = jax.convert_element_type(merge.due) {new_dtype=i32, weak_type=false}
              merge.calls = jax.select_n(merge.due, merge.more, 0:i32)
              w@GRAD@MERGED, w = jax.cond(merge.index, w@GRAD@MERGED, w) {branches=[^1, ^2]}
          block 1 (w@GRAD@MERGED@KEPT: f32[4], w@KEPT: f32[4]) -> (w@GRAD@MERGED@KEPT, w@KEPT)
          block 2 (w@GRAD@MERGED@GIVEN: f32[4], w@GIVEN: f32[4]) -> (w@GRAD@MERGED@ZERO, w@WHOLE)
            optimize
              w@GRAD: f32[4] = jax.div(w@GRAD@MERGED@GIVEN, 4.0:f32) for (w, w@GRAD)
              w@NEW: f32[4] = jax.sub(w@GIVEN, w@GRAD)
              w@WHOLE: f32[4] = c_complete(w@NEW)
              w@GRAD@MERGED@ZERO: f32[4] = jax.broadcast_in_dim(0.0:f32) {broadcast_dimensions=[], shape=[4]}
    """  # noqa: E501  # attributes stand on one line

    every: int = 4  # calls per update

    def __post_init__(self) -> None:
        if self.every < 1:
            raise PassError(f"{_NAME}: every {self.every} calls", hint="every is at least 1")

    def run(self, program: Program) -> Program:
        check_gradients_are_known(program, self.name)
        gradients = [name for x in program.root.ops for _, name in x.role_var]
        if not gradients:
            what = f"{self.name}: no operator of block 0 makes a gradient"
            raise PassError(what, hint="wrap the optimizer in jaxfleet.distributed_optimizer")
        update, _, fetches = _parts(program)
        self._check_shapes(program)
        self._check_order(program)
        sums = {x: _state(program.lookup(x), f"{x}@MERGED") for x in gradients}
        late = {x: _state(program.lookup(x), f"{x}@LAST") for x in _late(program, update, fetches)}
        made = UpdateBranch(program, sums, late, self.every).run(update)
        _, rest, fetches = _parts(made.program)  # with renumbered blocks
        calls = Variable(_CALLS, "i32", (), Kind.STATE)
        zeros = [(v, 0.0) for v in (*sums.values(), *late.values())]
        added = tuple(v.name for v in sums.values())
        held = with_extra_variables(made.program, [(calls, 0), *zeros], sums=added)
        counting, declared, index = periodic_condition(_CALLS, literal(self.every, "i32"), _NAME)
        names = {x: f"{x}@CALL" for x in gradients}
        adding = [update_op("jax.add", (v.name, names[x]), (v.name,)) for x, v in sums.items()]
        new = [*adding, *counting, conditional(index, made.names, made.blocks)]
        new += [update_op("assign", (v.name,), (x,)) for x, v in late.items()]
        ops = [*_renamed(rest, names), *(made_by(x, self) for x in new), *_renamed(fetches, names)]
        declared += [replace(program.lookup(x), name=name) for x, name in names.items()]
        return held.with_block(held.root.with_ops(ops, declare=declared).without_unused())

    def _check_shapes(self, program: Program) -> None:
        """Rejects per-example gradients: those of two calls are more examples, not a sum."""
        for x in program.root.ops:
            for param, gradient in x.role_var:
                like = program.lookup(gradient)
                if like.shape != program.variables[param].shape:
                    what = f"{self.name}: '{gradient}' has a gradient for each example"
                    raise PassError(what, op=x, hint="leave merge out, and train on larger batches")

    def _check_order(self, program: Program) -> None:
        """Rejects a program whose update cannot wait, with other operators between its parts.

        If one optimizer updates before another's gradients are computed, as in a GAN, those
        gradients depend on its update.
        """
        changed, read = set[str](), set[str]()
        trained = {param for x in program.root.ops for param, _ in x.role_var}
        for x in program.root.ops:
            if x.role not in _UPDATE and (early := sorted(trained & {*x.writes})):
                what = f"{self.name}: '{early[0]}' is updated before all gradients are there"
                raise PassError(what, op=x, hint="leave merge out, or make two steps of the one")
            if x.role in _UPDATE and x.type != "fetch":
                changed.update(x.writes)
                read.update(x.reads)
            elif x.type != "fetch" and (found := sorted(changed & {*x.reads} | read & {*x.writes})):
                what = f"{self.name}: '{found[0]}' is of the update, and used by what is not"
                raise PassError(what, op=x, hint="leave merge out")


def _parts(program: Program) -> tuple[list[Operator], list[Operator], list[Operator]]:
    """Returns the update, the operators before it, and the fetches."""
    ops = program.root.ops
    fetches = [x for x in ops if x.type == "fetch"]
    update = [x for x in ops if x.role in _UPDATE and x.type != "fetch"]
    return update, [x for x in ops if x.role not in _UPDATE and x.type != "fetch"], fetches


def _late(
    program: Program, update: Sequence[Operator], fetches: Sequence[Operator]
) -> Iterator[str]:
    made = {name for x in update for name in x.writes}
    for x in fetches:
        for name in dict.fromkeys(x.reads):
            if name in made and name in program.root.variables:
                if not all(isinstance(size, int) for size in program.lookup(name).shape):
                    what = f"merge: the update makes '{name}' of the rows of one call"
                    raise PassError(what, op=x, hint="leave it out of the metrics, or merge out")
                yield name


def _state(like: Variable, name: str) -> Variable:
    return replace(like, name=name, kind=Kind.STATE)


def _renamed(ops: Sequence[Operator], names: Mapping[str, str]) -> Iterator[Operator]:
    """Yields operators that use a call's gradients, unmarked so that those are not reduced."""
    for x in ops:
        pairs = tuple(pair for pair in x.role_var if pair[1] not in names)
        outs, ins = x.outputs.renamed(names), x.inputs.renamed(names)
        yield replace(x, inputs=ins, outputs=outs, role_var=pairs)
