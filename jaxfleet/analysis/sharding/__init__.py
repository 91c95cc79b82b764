"""Sharding propagation: how each value of a program is laid out over the devices."""

from jaxfleet.analysis.sharding.plan import SCATTER as SCATTER
from jaxfleet.analysis.sharding.plan import BlockPlan as BlockPlan
from jaxfleet.analysis.sharding.plan import OperatorSharding as OperatorSharding
from jaxfleet.analysis.sharding.plan import OperatorView as OperatorView
from jaxfleet.analysis.sharding.plan import OpPlan as OpPlan
from jaxfleet.analysis.sharding.plan import ShardingPlan as ShardingPlan
from jaxfleet.analysis.sharding.plan import StateSharding as StateSharding
from jaxfleet.analysis.sharding.plan import own_state as own_state
from jaxfleet.analysis.sharding.plan import summed_state as summed_state
from jaxfleet.analysis.sharding.propagation import propagate as propagate
from jaxfleet.analysis.sharding.spec import REPLICATED as REPLICATED
from jaxfleet.analysis.sharding.spec import SUM as SUM
from jaxfleet.analysis.sharding.spec import VARYING as VARYING
from jaxfleet.analysis.sharding.spec import Mesh as Mesh
from jaxfleet.analysis.sharding.spec import Sharding as Sharding
from jaxfleet.analysis.sharding.spec import ShardingKind as ShardingKind
from jaxfleet.analysis.sharding.spec import mesh_of as mesh_of
from jaxfleet.analysis.sharding.spec import sharded as sharded
