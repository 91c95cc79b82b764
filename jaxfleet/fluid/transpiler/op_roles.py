"""The names and numbers by which fluid's transpilers write down what an operator is for."""

from jaxfleet.fluid.operator import NAME_SCOPE, ROLE, ROLE_VAR
from jaxfleet.fluid.roles import OpRole

LOOKUP_TABLE_TYPE = "lookup_table"
LOOKUP_TABLE_GRAD_TYPE = "lookup_table_grad"
OP_NAME_SCOPE = NAME_SCOPE
CLIP_OP_NAME_SCOPE = "@CLIP"
OP_ROLE_VAR_ATTR_NAME = ROLE_VAR
RPC_OP_ROLE_ATTR_NAME = op_role_attr_name = ROLE
OPT_OP_ROLE_ATTR_VALUE = OpRole.OPTIMIZE
RPC_OP_ROLE_ATTR_VALUE = OpRole.RPC
DIST_OP_ROLE_ATTR_VALUE = OpRole.DIST
LR_SCHED_OP_ROLE_ATTR_VALUE = OpRole.LR_SCHED
