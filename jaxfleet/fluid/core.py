"""Names of `fluid.core`: places, scopes, variable types, operator roles."""

from importlib.metadata import entry_points

from jaxfleet.errors import EndOfDataError
from jaxfleet.fluid.dataset import CoreDataset
from jaxfleet.fluid.flags import Globals
from jaxfleet.fluid.framework.operator import DEVICE, NAME_SCOPE, ROLE, ROLE_VAR
from jaxfleet.fluid.framework.operator import OpRole as _Roles
from jaxfleet.fluid.framework.types import VarType
from jaxfleet.fluid.lod_tensor import LoDTensor as LoDTensor
from jaxfleet.fluid.places import AnyPlace
from jaxfleet.fluid.places import CPUPlace as CPUPlace
from jaxfleet.fluid.places import CUDAPlace as CUDAPlace
from jaxfleet.fluid.scope import Scope as Scope
from jaxfleet.fluid.scope import SelectedRows as SelectedRows
from jaxfleet.ops.fluid import EMPTY, GRAD

EOFException = EndOfDataError  # fluid's names
Dataset, Place = CoreDataset, AnyPlace


class VarDesc:
    """Variable types."""

    VarType = VarType


class op_proto_and_checker_maker:  # noqa: N801  # fluid's name
    """The roles of operators, and the attributes that hold them."""

    class OpRole:
        """The part of a training step to which an operator belongs."""

        Forward, Backward, Optimize = _Roles.FORWARD, _Roles.BACKWARD, _Roles.OPTIMIZE
        RPC, Dist, LRSched, Loss = _Roles.RPC, _Roles.DIST, _Roles.LR_SCHED, _Roles.LOSS

    @staticmethod
    def kOpRoleAttrName() -> str:  # noqa: N802  # fluid's name
        """Returns the name of the role attribute."""
        return ROLE

    @staticmethod
    def kOpRoleVarAttrName() -> str:  # noqa: N802  # fluid's name
        """Returns the name of the attribute with parameters and gradients."""
        return ROLE_VAR

    @staticmethod
    def kOpNameScopeAttrName() -> str:  # noqa: N802  # fluid's name
        """Returns the name of the name scope attribute."""
        return NAME_SCOPE

    @staticmethod
    def kOpDeviceAttrName() -> str:  # noqa: N802  # fluid's name
        """Returns the name of the attribute that `device_guard` sets."""
        return DEVICE


def is_compiled_with_cuda() -> bool:
    """Whether JAX is installed for GPUs; starts no backend, so a GPU may still be absent."""
    return any("cuda" in found.name for found in entry_points(group="jax_plugins"))


def kEmptyVarName() -> str:  # noqa: N802  # fluid's name
    """Returns the name of an omitted variable."""
    return EMPTY


def kControlDepVarName() -> str:  # noqa: N802  # fluid's name
    """Returns the prefix of control variables, which only order operators."""
    return "__control_var"


def kGradVarSuffix() -> str:  # noqa: N802  # fluid's name
    """Returns the suffix of gradients."""
    return GRAD


def globals() -> Globals:
    """Returns the flags as one mapping, which scripts read and set."""
    return Globals()
