"""From a script's program to those of the processes of a job, under fluid's names."""

from jaxfleet.fluid.transpiler import collective as collective
from jaxfleet.fluid.transpiler import details as details
from jaxfleet.fluid.transpiler.blocks import VarBlock as VarBlock
from jaxfleet.fluid.transpiler.blocks import same_or_split_var as same_or_split_var
from jaxfleet.fluid.transpiler.blocks import slice_variable as slice_variable
from jaxfleet.fluid.transpiler.config import DistributedMode as DistributedMode
from jaxfleet.fluid.transpiler.config import (
    DistributeTranspilerConfig as DistributeTranspilerConfig,
)
from jaxfleet.fluid.transpiler.config import ServerRuntimeConfig as ServerRuntimeConfig
from jaxfleet.fluid.transpiler.details.program_utils import delete_ops as delete_ops
from jaxfleet.fluid.transpiler.details.program_utils import (
    find_op_by_output_arg as find_op_by_output_arg,
)
from jaxfleet.fluid.transpiler.details.union_find import UnionFind as UnionFind
from jaxfleet.fluid.transpiler.details.vars_distributed import VarsDistributed as VarsDistributed
from jaxfleet.fluid.transpiler.details.vars_distributed import VarStruct as VarStruct
from jaxfleet.fluid.transpiler.distribute_transpiler import (
    DistributeTranspiler as DistributeTranspiler,
)
from jaxfleet.fluid.transpiler.fl_distribute_transpiler import (
    FLDistributeTranspiler as FLDistributeTranspiler,
)
from jaxfleet.fluid.transpiler.geo_sgd_transpiler import GeoSgdTranspiler as GeoSgdTranspiler
from jaxfleet.fluid.transpiler.memory import memory_optimize as memory_optimize
from jaxfleet.fluid.transpiler.memory import release_memory as release_memory
from jaxfleet.fluid.transpiler.op_roles import CLIP_OP_NAME_SCOPE as CLIP_OP_NAME_SCOPE
from jaxfleet.fluid.transpiler.op_roles import DIST_OP_ROLE_ATTR_VALUE as DIST_OP_ROLE_ATTR_VALUE
from jaxfleet.fluid.transpiler.op_roles import LOOKUP_TABLE_GRAD_TYPE as LOOKUP_TABLE_GRAD_TYPE
from jaxfleet.fluid.transpiler.op_roles import LOOKUP_TABLE_TYPE as LOOKUP_TABLE_TYPE
from jaxfleet.fluid.transpiler.op_roles import (
    LR_SCHED_OP_ROLE_ATTR_VALUE as LR_SCHED_OP_ROLE_ATTR_VALUE,
)
from jaxfleet.fluid.transpiler.op_roles import OP_NAME_SCOPE as OP_NAME_SCOPE
from jaxfleet.fluid.transpiler.op_roles import OP_ROLE_VAR_ATTR_NAME as OP_ROLE_VAR_ATTR_NAME
from jaxfleet.fluid.transpiler.op_roles import OPT_OP_ROLE_ATTR_VALUE as OPT_OP_ROLE_ATTR_VALUE
from jaxfleet.fluid.transpiler.op_roles import RPC_OP_ROLE_ATTR_NAME as RPC_OP_ROLE_ATTR_NAME
from jaxfleet.fluid.transpiler.op_roles import RPC_OP_ROLE_ATTR_VALUE as RPC_OP_ROLE_ATTR_VALUE
from jaxfleet.fluid.transpiler.op_roles import op_role_attr_name as op_role_attr_name
from jaxfleet.fluid.transpiler.ports import wait_server_ready as wait_server_ready
from jaxfleet.fluid.transpiler.ps_dispatcher import HashName as HashName
from jaxfleet.fluid.transpiler.ps_dispatcher import PSDispatcher as PSDispatcher
from jaxfleet.fluid.transpiler.ps_dispatcher import RoundRobin as RoundRobin
