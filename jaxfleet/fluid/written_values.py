"""Which value of a variable an operator reads or writes, where it is written more than once.

Loops, branches and `increment` write variables in place. Backward must tell the values apart: the
gradient of what a variable held before a loop is another than that of what it holds afterwards,
and what an operator has read may be overwritten by the time its gradient is taken.
"""

from collections import Counter
from collections.abc import Sequence

from jaxfleet.fluid.operator import Operator


class WrittenValues:
    """Numbers the values that variables have: 0 at the beginning, 1 after the first writer, ...

    Args:
        ops: those of a block, in order.
    """

    def __init__(self, ops: Sequence[Operator]) -> None:
        self._before: dict[int, dict[str, int]] = {}
        count: Counter[str] = Counter()
        for op in ops:
            names = {*op.input_arg_names, *op.output_arg_names}
            self._before[id(op)] = {name: count[name] for name in names if count[name]}
            count.update({*op.output_arg_names})
        self._last = count

    def before(self, op: Operator, name: str) -> int:
        """Returns which value an operator reads."""
        return self._before[id(op)].get(name, 0)

    def after(self, op: Operator, name: str) -> int:
        """Returns which value an operator writes."""
        return self.before(op, name) + 1

    def last(self, name: str) -> int:
        """Returns which value a variable has at the end."""
        return self._last[name]
