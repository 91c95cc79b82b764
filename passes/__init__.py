"""Passes, one a file; importing this package registers them."""

from jaxfleet.passes.broadcast_params import BroadcastParams as BroadcastParams
from jaxfleet.passes.clip_on_trainers import ClipOnTrainers as ClipOnTrainers
from jaxfleet.passes.comm_init import CommInit as CommInit
from jaxfleet.passes.comm_init_all import CommInitAll as CommInitAll
from jaxfleet.passes.compress_sends import CompressSends as CompressSends
from jaxfleet.passes.data_parallel import DataParallel as DataParallel
from jaxfleet.passes.dc_asgd import DcAsgd as DcAsgd
from jaxfleet.passes.dce import DeadCodeElimination as DeadCodeElimination
from jaxfleet.passes.dispatch import Dispatch as Dispatch
from jaxfleet.passes.donate import Donate as Donate
from jaxfleet.passes.fl_average import FlAverage as FlAverage
from jaxfleet.passes.fuse_allreduce import FuseAllreduce as FuseAllreduce
from jaxfleet.passes.gen_nccl_id import GenNcclId as GenNcclId
from jaxfleet.passes.geo_sgd import GeoSgd as GeoSgd
from jaxfleet.passes.grad_allreduce import GradAllreduce as GradAllreduce
from jaxfleet.passes.grad_allreduce_by_role import GradAllreduceByRole as GradAllreduceByRole
from jaxfleet.passes.insert_send_recv import InsertSendRecv as InsertSendRecv
from jaxfleet.passes.insert_startup import InsertStartup as InsertStartup
from jaxfleet.passes.local_sgd import LocalSGD as LocalSGD
from jaxfleet.passes.merge_sends import MergeSends as MergeSends
from jaxfleet.passes.prefetch_rows import PrefetchRows as PrefetchRows
from jaxfleet.passes.schedule_sends import ScheduleSends as ScheduleSends
from jaxfleet.passes.slice_var import SliceVar as SliceVar
from jaxfleet.passes.snapshot_params import SnapshotParams as SnapshotParams
from jaxfleet.passes.sparse_table import SparseTable as SparseTable
