"""What operators do to the world besides writing their outputs."""

from jaxfleet.errors import ProgramError
from jaxfleet.ir import Operator
from jaxfleet.ops import find_op


class Effects:
    """Knows which operator types do something besides writing their outputs.

    A type that is not registered is taken to: nothing is known of it.
    """

    def __init__(self) -> None:
        self._collective: dict[str, bool] = {}
        self._effect: dict[str, bool] = {}

    def has_effect(self, op: Operator) -> bool:
        """Tells whether the operator acts on the world, collectives left aside."""
        self._learn(op.type)
        return self._effect[op.type]

    def is_collective(self, op: Operator) -> bool:
        """Tells whether all devices must run the operator together."""
        self._learn(op.type)
        return self._collective[op.type]

    def _learn(self, op_type: str) -> None:
        if op_type in self._effect:
            return
        try:
            found = find_op(op_type)
        except ProgramError:
            self._effect[op_type], self._collective[op_type] = True, False
        else:
            self._effect[op_type] = found.has_effect
            self._collective[op_type] = found.is_collective
