"""Replication labels: how each value of a program lies on the devices."""

from jaxfleet.analysis.labels.held import SCATTER as SCATTER
from jaxfleet.analysis.labels.held import Held as Held
from jaxfleet.analysis.labels.held import own_state as own_state
from jaxfleet.analysis.labels.held import summed as summed
from jaxfleet.analysis.labels.infer import infer as infer
from jaxfleet.analysis.labels.label import REPLICATED as REPLICATED
from jaxfleet.analysis.labels.label import SUM as SUM
from jaxfleet.analysis.labels.label import VARYING as VARYING
from jaxfleet.analysis.labels.label import Label as Label
from jaxfleet.analysis.labels.label import Layout as Layout
from jaxfleet.analysis.labels.label import sharded as sharded
from jaxfleet.analysis.labels.mesh import Mesh as Mesh
from jaxfleet.analysis.labels.mesh import mesh_of as mesh_of
from jaxfleet.analysis.labels.placing import Placing as Placing
from jaxfleet.analysis.labels.placing import View as View
from jaxfleet.analysis.labels.plan import BlockPlan as BlockPlan
from jaxfleet.analysis.labels.plan import OpPlan as OpPlan
from jaxfleet.analysis.labels.plan import Plan as Plan
