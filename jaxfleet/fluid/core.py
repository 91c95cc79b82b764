"""What scripts take from fluid's core: places, scopes, kinds of variables, roles."""

from importlib.metadata import entry_points

from jaxfleet.errors import EndOfDataError
from jaxfleet.fluid.dataset import CoreDataset
from jaxfleet.fluid.dtypes import VarType
from jaxfleet.fluid.flags import Globals
from jaxfleet.fluid.lod_tensor import LoDTensor as LoDTensor
from jaxfleet.fluid.operator import DEVICE, NAME_SCOPE, ROLE, ROLE_VAR
from jaxfleet.fluid.places import AnyPlace
from jaxfleet.fluid.places import CPUPlace as CPUPlace
from jaxfleet.fluid.places import CUDAPlace as CUDAPlace
from jaxfleet.fluid.roles import OpRole as _Roles
from jaxfleet.fluid.scope import Scope as Scope
from jaxfleet.fluid.selected_rows import SelectedRows as SelectedRows
from jaxfleet.ops.fluid import EMPTY, GRAD

EOFException = EndOfDataError  # fluid's names
Dataset, Place = CoreDataset, AnyPlace


class VarDesc:
    """What a variable is."""

    VarType = VarType


class op_proto_and_checker_maker:  # noqa: N801  # fluid's name
    """The roles of operators, and the attributes that hold them."""

    class OpRole:
        """What part of a training step an operator belongs to."""

        Forward, Backward, Optimize = _Roles.FORWARD, _Roles.BACKWARD, _Roles.OPTIMIZE
        RPC, Dist, LRSched, Loss = _Roles.RPC, _Roles.DIST, _Roles.LR_SCHED, _Roles.LOSS

    @staticmethod
    def kOpRoleAttrName() -> str:  # noqa: N802  # fluid's name
        """Returns the attribute that holds a role."""
        return ROLE

    @staticmethod
    def kOpRoleVarAttrName() -> str:  # noqa: N802  # fluid's name
        """Returns the attribute that names parameters and gradients."""
        return ROLE_VAR

    @staticmethod
    def kOpNameScopeAttrName() -> str:  # noqa: N802  # fluid's name
        """Returns the attribute that holds the name scope."""
        return NAME_SCOPE

    @staticmethod
    def kOpDeviceAttrName() -> str:  # noqa: N802  # fluid's name
        """Returns the attribute that `device_guard` sets."""
        return DEVICE


def is_compiled_with_cuda() -> bool:
    """Tells whether JAX is installed for GPUs; starts no backend, so there may yet be none."""
    return any("cuda" in found.name for found in entry_points(group="jax_plugins"))


def kEmptyVarName() -> str:  # noqa: N802  # fluid's name
    """Returns the name that stands for no variable."""
    return EMPTY


def kControlDepVarName() -> str:  # noqa: N802  # fluid's name
    """Returns what the name of a variable begins with that only orders operators."""
    return "__control_var"


def kGradVarSuffix() -> str:  # noqa: N802  # fluid's name
    """Returns what the name of a gradient ends with."""
    return GRAD


def globals() -> Globals:
    """Returns the flags as one mapping, by which scripts read and set them."""
    return Globals()
