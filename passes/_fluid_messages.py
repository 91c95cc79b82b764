"""Makes the operators of fluid's dialect that talk with servers, and what orders them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from jaxfleet.ir import Attr, Attrs, Operands, Operator, Role, Variable
from jaxfleet.passes._job import Mark

_CONTROL = "__control_var@"  # what says in fluid that an operator runs after another


@dataclass
class Messages:
    """Makes the operators that talk with servers, and the variables that order them.

    Attributes:
        mark: says who made an operator.
        declared: what their operands need.
    """

    mark: Mark
    declared: dict[str, Variable] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=count)

    def control(self) -> str:
        """Returns a new control variable."""
        name = f"{_CONTROL}{next(self._numbers)}"
        self.declared[name] = Variable(name, "raw", ())
        return name

    def rpc(
        self,
        op_type: str,
        read: Sequence[str],
        written: Sequence[str],
        attrs: Mapping[str, Attr],
        pair: tuple[tuple[str, str], ...] = (),
    ) -> Operator:
        """Returns an operator that talks with servers."""
        ins, outs = Operands.named(X=read), Operands.named(Out=written)
        return self.mark(Operator(op_type, ins, outs, Attrs(attrs), Role.RPC, pair))

    def cut_or_join(
        self, op_type: str, read: Sequence[str], written: Sequence[str], attrs: Mapping[str, Attr]
    ) -> Operator:
        """Returns an operator that cuts a value in slices, or joins them."""
        ins, outs = Operands.named(X=read), Operands.named(Out=written)
        return self.mark(Operator(op_type, ins, outs, Attrs(attrs), Role.DIST))
