"""Makes a branch of a step's update, which runs on gradients that were added up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxfleet.analysis.uses import OuterUses
from jaxfleet.errors import PassError
from jaxfleet.ir import Attr, Attrs, Block, BlockRef, Kind, Operand, Operator, Program, Variable
from jaxfleet.ir.names import unique
from jaxfleet.ir.values import map_attr
from jaxfleet.passes._when_due import number, op, unchanged

_BODY = 2  # the place of the branch; block 1 is the one in which nothing changes


@dataclass(frozen=True)
class Branch:
    """An update as a branch.

    Attributes:
        program: with the two blocks; those that were there come after them.
        names: the variables that the branch is given, and that it writes anew.
        blocks: of the two branches.
    """

    program: Program
    names: tuple[str, ...]
    blocks: tuple[int, int]


@dataclass
class UpdateBranch:
    """Moves the operators of an update into a block of their own.

    There every value has one name and every name one value: what is given is `w@GIVEN`, and what
    becomes of it `w@NEW`.

    Args:
        program: whose update it is.
        sums: for each gradient, the variable that holds its sum.
        late: for each value that is fetched of the update, the variable that holds it.
        every: how many gradients a sum is of.
    """

    program: Program
    sums: Mapping[str, Variable]
    late: Mapping[str, Variable]
    every: int
    variables: dict[str, Variable] = field(default_factory=dict)
    current: dict[str, str] = field(default_factory=dict)
    given: dict[str, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)

    def run(self, update: Sequence[Operator]) -> Branch:
        """Returns the program with the branch."""
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
        return Branch(self._program(body, update), names, (1, _BODY))

    def _program(self, body: Block, update: Sequence[Operator]) -> Program:
        moved = {index + _BODY for each in update for index in each.blocks}
        others = [_moved(block, moved) for block in self.program.blocks]
        own = {x for x in self.variables if x in self.program.root.variables}
        kept = {n: v for n, v in others[0].variables.items() if n not in own}
        root = replace(others[0], variables=kept)
        still = unchanged([(x, self._like(x)) for x in self.given])
        return replace(self.program, blocks=(root, still, body.without_unused(), *others[1:]))

    def _mean(self, gradient: str) -> Operator:
        """Returns the operator that makes the gradient of an update of its sum."""
        variable = self.program.lookup(gradient)
        pairs = [pair for x in self.program.root.ops for pair in x.role_var if pair[1] == gradient]
        self.variables[gradient] = variable
        self.current[gradient] = gradient
        total = self._given(self.sums[gradient].name)
        mean = op("jax.div", (total, number(self.every, variable.dtype)), (gradient,))
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
        """Returns what a variable becomes; a parameter every device then has all of."""
        value = self.current[name]
        if self.program.variables[name].kind is not Kind.PARAM:
            return value
        whole = self._declared(name, "WHOLE")
        ops.append(op("c_complete", (value,), (whole,)))
        return whole

    def _zero(self, variable: Variable, ops: list[Operator]) -> Operand:
        """Returns with what a sum begins anew."""
        zero = number(0, variable.dtype)
        if not variable.shape:
            return zero
        name, shape = self._declared(variable.name, "ZERO"), variable.shape
        attrs: dict[str, Attr] = {"broadcast_dimensions": (), "shape": shape}
        ops.append(op("jax.broadcast_in_dim", (zero,), (name,), **attrs))
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
    """Returns an operator whose blocks come after the two of the branch."""

    def leaf(attr: Attr) -> Attr:
        return BlockRef(attr.index + _BODY) if isinstance(attr, BlockRef) else attr

    if not each.blocks:
        return each
    return replace(each, attrs=Attrs({k: map_attr(v, leaf) for k, v in each.attrs.items()}))


def _moved(block: Block, inside: set[int]) -> Block:
    """Returns a block in its new place; what the update runs lies inside the branch."""
    if not block.index:
        return block.with_ops(map(_shifted, block.ops))
    index = block.index + _BODY
    parent = _BODY if index in inside else block.parent + _BODY if block.parent else 0
    return replace(block, index=index, parent=parent).with_ops(map(_shifted, block.ops))
