"""Turns Programs into compiled functions on devices."""

from jaxfleet.lower.blocks import ExecutableCache as ExecutableCache
from jaxfleet.lower.blocks import LoweredBlock as LoweredBlock
from jaxfleet.lower.blocks import compute_in_place as compute_in_place
from jaxfleet.lower.blocks import lower_block as lower_block
from jaxfleet.lower.function import ProgramFunction as ProgramFunction
from jaxfleet.lower.function import cut_axes as cut_axes
from jaxfleet.lower.function import device_count as device_count
from jaxfleet.lower.function import inputs_of as inputs_of
from jaxfleet.lower.host_arrays import HostType as HostType
from jaxfleet.lower.host_arrays import all_to_device as all_to_device
from jaxfleet.lower.host_arrays import host_type as host_type
from jaxfleet.lower.host_arrays import is_key as is_key
from jaxfleet.lower.host_arrays import to_device as to_device
from jaxfleet.lower.host_arrays import to_host as to_host
from jaxfleet.lower.parallel import ParallelFunction as ParallelFunction
from jaxfleet.lower.sizes import bind_sizes as bind_sizes
from jaxfleet.lower.spmd import AXIS as AXIS
from jaxfleet.lower.spmd import Layout as Layout
from jaxfleet.lower.spmd import device_mesh as device_mesh
from jaxfleet.lower.spmd import shardings as shardings
from jaxfleet.lower.spmd import with_shard_map as with_shard_map
from jaxfleet.lower.step import Interface as Interface
from jaxfleet.lower.step import LoweredStep as LoweredStep
from jaxfleet.lower.step import Shares as Shares
from jaxfleet.lower.step import lower_step as lower_step
