"""`fluid.framework`: programs and their parts, under one name."""

from jaxfleet.fluid import unique_name as _unique_name
from jaxfleet.fluid.core import is_compiled_with_cuda as is_compiled_with_cuda
from jaxfleet.fluid.core import kControlDepVarName as _kControlDepVarName
from jaxfleet.fluid.flags import get_flags as get_flags
from jaxfleet.fluid.flags import set_flags as set_flags
from jaxfleet.fluid.framework.block import Block as Block
from jaxfleet.fluid.framework.guards import device_guard as device_guard
from jaxfleet.fluid.framework.guards import name_scope as name_scope
from jaxfleet.fluid.framework.operator import Operator as Operator
from jaxfleet.fluid.framework.operator import OpProtoHolder as OpProtoHolder
from jaxfleet.fluid.framework.program import Program as Program
from jaxfleet.fluid.framework.program import default_main_program as default_main_program
from jaxfleet.fluid.framework.program import default_startup_program as default_startup_program
from jaxfleet.fluid.framework.program import program_guard as program_guard
from jaxfleet.fluid.framework.program import switch_main_program as switch_main_program
from jaxfleet.fluid.framework.program import switch_startup_program as switch_startup_program
from jaxfleet.fluid.framework.variable import Parameter as Parameter
from jaxfleet.fluid.framework.variable import Variable as Variable
from jaxfleet.fluid.places import CPUPlace as CPUPlace
from jaxfleet.fluid.places import CUDAPlace as CUDAPlace
from jaxfleet.fluid.places import cpu_places as cpu_places
from jaxfleet.fluid.places import cuda_places as cuda_places
from jaxfleet.ir import grad_name as _grad_name

_CONTROL = _kControlDepVarName()


def grad_var_name(var_name: str) -> str:
    """Returns the name of a variable's gradient."""
    return _grad_name(var_name)


def generate_control_dev_var_name() -> str:
    """Returns a new name for a control variable, which only orders operators."""
    return f"{_CONTROL}@{_unique_name.generate(_CONTROL)}"


def in_dygraph_mode() -> bool:
    """Whether operators run eagerly: never here."""
    return False
