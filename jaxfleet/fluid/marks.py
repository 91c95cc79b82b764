"""What a program says besides its operators: the role of new ones, what transpilers found."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from jaxfleet.fluid.roles import OpRole
from jaxfleet.fluid.variable import Variable

_OF_SERVERS = (
    "_is_distributed",
    "_is_chief",
    "_parameters_on_pservers",
    "_endpoints",
    "_ps_endpoint",
    "_distributed_lookup_table",
)


class Roles:
    """The role of the operators that are added to a program now, under fluid's names.

    Attributes:
        op_role: it; also `_op_role` and `_current_role`.
        op_role_var: the (parameter, gradient) names that they are about; also `_op_role_var`.
    """

    def __init__(self) -> None:
        self.op_role = OpRole.FORWARD
        self.op_role_var: list[str] = []

    @contextmanager
    def role(self, role: int, about: Sequence[str] = ()) -> Iterator[None]:
        """Gives the operators that are added within a `with` a role."""
        old = self.op_role, self.op_role_var
        self.op_role, self.op_role_var = role, list(about)
        try:
            yield
        finally:
            self.op_role, self.op_role_var = old

    @property
    def _op_role(self) -> int:
        return self.op_role

    @_op_role.setter
    def _op_role(self, role: int) -> None:
        self.op_role = role

    _current_role = _op_role

    @property
    def _op_role_var(self) -> list[str]:
        return self.op_role_var

    @_op_role_var.setter
    def _op_role_var(self, names: Sequence[str]) -> None:
        self.op_role_var = list(names)

    def _backward_role_guard(self) -> AbstractContextManager[None]:
        return self.role(OpRole.BACKWARD)

    def _optimized_guard(
        self, param_and_grads: Sequence[Variable | str]
    ) -> AbstractContextManager[None]:
        names = [x if isinstance(x, str) else x.name for x in param_and_grads]
        return self.role(OpRole.OPTIMIZE, names)

    def _lr_schedule_guard(self, is_with_opt: bool = False) -> AbstractContextManager[None]:
        return self.role(OpRole.LR_SCHED | (OpRole.OPTIMIZE if is_with_opt else 0))


class Findings:
    """What transpilers and optimizers say of a program, as it is before them."""

    def __init__(self) -> None:
        self._is_distributed, self._is_chief = False, False
        self._parameters_on_pservers: Any = None
        self._endpoints: list[str] = []
        self._ps_endpoint: str | None = None
        self._distributed_lookup_table: str | None = None
        self._trainers_endpoints: list[str] = []
        self._nccl_comm_num = 1
        self._use_hierarchical_allreduce = False
        self._hierarchical_allreduce_inter_nranks = 0
        self._enable_dgc, self._use_lamb = False, False
        self._fleet_opt: Any = None
        self._pipeline_opt: Any = None
        self._program_config: Any = None
        self._is_mem_optimized, self._prints_memory = False, False
        self._appending_grad_times = 0
        self._origin_program: Any = None  # what it was before a transpiler

    def _take_over(self, other: "Findings") -> None:
        """Takes over where another program's parameters are."""
        for name in _OF_SERVERS:
            setattr(self, name, getattr(other, name))
