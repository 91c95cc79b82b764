"""Helpers of fluid's transpilers that scripts and tools import."""

from jaxfleet.fluid.transpiler.details.program_utils import UnionFind as UnionFind
from jaxfleet.fluid.transpiler.details.program_utils import block_to_code as block_to_code
from jaxfleet.fluid.transpiler.details.program_utils import delete_ops as delete_ops
from jaxfleet.fluid.transpiler.details.program_utils import (
    find_op_by_input_arg as find_op_by_input_arg,
)
from jaxfleet.fluid.transpiler.details.program_utils import (
    find_op_by_output_arg as find_op_by_output_arg,
)
from jaxfleet.fluid.transpiler.details.program_utils import op_to_code as op_to_code
from jaxfleet.fluid.transpiler.details.program_utils import program_to_code as program_to_code
from jaxfleet.fluid.transpiler.details.program_utils import variable_to_code as variable_to_code
from jaxfleet.fluid.transpiler.details.program_utils import wait_server_ready as wait_server_ready
from jaxfleet.fluid.transpiler.details.vars_distributed import VarDistributed as VarDistributed
from jaxfleet.fluid.transpiler.details.vars_distributed import VarsDistributed as VarsDistributed
from jaxfleet.fluid.transpiler.details.vars_distributed import VarStruct as VarStruct
