"""What operators want of the lengths of sequences that are fed, checked before a run."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jaxfleet.errors import FeedError
from jaxfleet.fluid.operator import Operator
from jaxfleet.fluid.program import Program
from jaxfleet.fluid.ragged import ragged_data, source_of
from jaxfleet.fluid.variable import Variable

LIMITED = frozenset({"sequence_pad", "sequence_reshape"})  # take lengths of some kind alone


@dataclass(frozen=True)
class Limit:
    """What an operator wants of the lengths of sequences.

    Attributes:
        op_type: the operator's.
        most: the longest that it takes; 0 for any.
        factor: what each length is a multiple of.
    """

    op_type: str
    most: int = 0
    factor: int = 1

    @classmethod
    def of(cls, op: Operator, x: Variable) -> "Limit":
        if op.type == "sequence_pad":
            return cls(op.type, most=max(op.attr("padded_length"), 0))
        wide = op.attr("new_dim")
        return cls(op.type, factor=wide // math.gcd(wide, x.shape[1]))

    def check(self, name: str, lengths: Sequence[int]) -> None:
        """Checks lengths.

        Raises:
            FeedError: the operator takes none such.
        """
        longest = max(lengths, default=0)
        if self.most and longest > self.most:
            what = f"'{name}' is fed a sequence of {longest} rows, and {self.op_type} pads to "
            raise FeedError(f"{what}{self.most}", hint="give it a larger maxlen, or None")
        odd = next((n for n in lengths if n % self.factor), None)
        if odd is not None:
            what = (
                f"'{name}' is fed a sequence of {odd} rows, and {self.op_type} makes one of each "
            )
            raise FeedError(f"{what}{self.factor}", hint="feed lengths that divide")


def limits_of(
    program: Program, together: Iterable[Sequence[str]]
) -> Mapping[str, tuple[Limit, ...]]:
    """Returns what operators want of lengths, of those that read what is fed as it is."""
    same = {name: names for names in together for name in names}
    ragged, found = ragged_data(program), dict[str, tuple[Limit, ...]]()
    for block in program.blocks:
        for op in block.ops:
            if op.type not in LIMITED:
                continue
            x = block._var_recursive(op.input("X")[0])
            source = source_of(x, ragged)
            for name in same.get(source.name, ()) if source else ():
                found[name] = (*found.get(name, ()), Limit.of(op, x))
    return found
