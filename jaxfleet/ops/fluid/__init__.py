"""Fluid's operators: what they look like, and what they and their gradients compute."""

from jaxfleet.ir.names import GRAD as GRAD
from jaxfleet.ops.fluid import activations as activations
from jaxfleet.ops.fluid import arrays as arrays
from jaxfleet.ops.fluid import communication as communication
from jaxfleet.ops.fluid import control as control
from jaxfleet.ops.fluid import convolution as convolution
from jaxfleet.ops.fluid import elementwise as elementwise
from jaxfleet.ops.fluid import indexing as indexing
from jaxfleet.ops.fluid import losses as losses
from jaxfleet.ops.fluid import metrics as metrics
from jaxfleet.ops.fluid import networks as networks
from jaxfleet.ops.fluid import normalization as normalization
from jaxfleet.ops.fluid import random as random
from jaxfleet.ops.fluid import rows as rows
from jaxfleet.ops.fluid import sequences as sequences
from jaxfleet.ops.fluid import servers as servers
from jaxfleet.ops.fluid import shapes as shapes
from jaxfleet.ops.fluid import updates as updates
from jaxfleet.ops.fluid.random import RANDOM_OPS as RANDOM_OPS
from jaxfleet.ops.fluid.random import RUN_SLOT as RUN_SLOT
from jaxfleet.ops.fluid.schema import EMPTY as EMPTY
from jaxfleet.ops.fluid.schema import UNWANTED as UNWANTED
from jaxfleet.ops.fluid.schema import Gradient as Gradient
from jaxfleet.ops.fluid.schema import Schema as Schema
from jaxfleet.ops.fluid.schema import Slot as Slot
from jaxfleet.ops.fluid.schema import schema_of as schema_of
