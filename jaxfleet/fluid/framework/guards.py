"""Guards that mark new operators with a role, a name scope or a device; attributes of a program."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from jaxfleet.errors import AssertedError
from jaxfleet.fluid.argument_checks import mistake, warn_no_effect
from jaxfleet.fluid.framework.operator import OpRole
from jaxfleet.fluid.framework.variable import Variable


@dataclass
class _NameScope:
    path: str = "/"
    used: Counter[str] = field(default_factory=Counter)

    def inner(self, prefix: str) -> "_NameScope":
        number = self.used[prefix]
        self.used[prefix] += 1
        return _NameScope(f"{self.path}{prefix}_{number}/" if number else f"{self.path}{prefix}/")


@dataclass
class _Current:
    scope: _NameScope = field(default_factory=_NameScope)
    device: str = ""


_CURRENT = _Current()


@contextmanager
def name_scope(prefix: str | None = None) -> Iterator[None]:
    """Marks the operators added within a `with` block with `op_namescope`.

    Scopes nest: `/encoder/`, `/encoder/attention/`. Reusing a prefix at the same level yields
    `/encoder_1/`.

    Raises:
        AssertionError: the prefix is empty.
    """
    if not prefix:
        raise mistake("a name scope's prefix is empty", "give it a name", AssertedError)
    old = _CURRENT.scope
    _CURRENT.scope = old.inner(prefix)
    try:
        yield
    finally:
        _CURRENT.scope = old


def current_name_scope() -> str:
    """Returns the path of the current name scope; `/` at the top level."""
    return _CURRENT.scope.path


@contextmanager
def device_guard(device: str | None = None) -> Iterator[None]:
    """Marks the operators added within a `with` block with `op_device`.

    XLA places a program as a whole, so the mark moves nothing and serves only to distinguish
    programs. A device with a number, which cuts a program into sections in fluid, causes a
    warning. `device` is `cpu`, `gpu` or `gpu:1`; empty or None for no device.

    Raises:
        ValueError: any other value.
    """
    name, colon, number = (device or "").partition(":")
    if name not in {"", "cpu", "gpu"} or (colon and not (name == "gpu" and number.isdecimal())):
        raise mistake(f"{device!r} is no device", "it is cpu, gpu, gpu:1, ..., or None")
    if number:
        reason = "a program runs whole on each of its devices; shard a captured step to divide it"
        warn_no_effect(f"device_guard({device!r})", reason)
    old, _CURRENT.device = _CURRENT.device, device or ""
    try:
        yield
    finally:
        _CURRENT.device = old


def current_device() -> str:
    """Returns the device with which operators are marked; empty for none."""
    return _CURRENT.device


_OF_SERVERS = (
    "_is_distributed",
    "_is_chief",
    "_parameters_on_pservers",
    "_endpoints",
    "_ps_endpoint",
    "_distributed_lookup_table",
)


class RoleGuards:
    """The role of the operators that are currently added to a program, under fluid's names.

    Attributes:
        op_role: the role; also `_op_role` and `_current_role`.
        op_role_var: the (parameter, gradient) names that the operators concern; also
            `_op_role_var`.
    """

    def __init__(self) -> None:
        self.op_role = OpRole.FORWARD
        self.op_role_var: list[str] = []

    @contextmanager
    def role(self, role: int, about: Sequence[str] = ()) -> Iterator[None]:
        """Assigns a role to the operators added within a `with` block."""
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


class ProgramAttributes:
    """Records of transpilers and optimizers about a program, with their initial values."""

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
        self._origin_program: Any = None  # the program before a transpiler ran

    def _take_over(self, other: "ProgramAttributes") -> None:
        """Copies the placement of another program's parameters."""
        for name in _OF_SERVERS:
            setattr(self, name, getattr(other, name))
