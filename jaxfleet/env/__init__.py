"""The only package that reads the environment.

It lists every variable with its meaning; all other code takes values as arguments. Readers raise
`StrategyError` if a value is invalid, contradicts another, or is required and missing.
"""

from jaxfleet.env.fluid import ensure_cpu_num as ensure_cpu_num
from jaxfleet.env.fluid import preset_flag as preset_flag
from jaxfleet.env.fluid import read_check_nan_inf as read_check_nan_inf
from jaxfleet.env.fluid import read_cpu_num as read_cpu_num
from jaxfleet.env.fluid import read_rpc_deadline_ms as read_rpc_deadline_ms
from jaxfleet.env.fluid import read_selected_gpus as read_selected_gpus
from jaxfleet.env.fluid import read_visible_gpus as read_visible_gpus
from jaxfleet.env.fluid import rpc_threads as rpc_threads
from jaxfleet.env.fluid import says_how_many_cpu_devices as says_how_many_cpu_devices
from jaxfleet.env.fluid import wants_gpus as wants_gpus
from jaxfleet.env.folders import is_private as is_private
from jaxfleet.env.folders import runtime_dir as runtime_dir
from jaxfleet.env.jobs import MOVING as MOVING
from jaxfleet.env.jobs import CloudNodes as CloudNodes
from jaxfleet.env.jobs import JobName as JobName
from jaxfleet.env.jobs import PserverRole as PserverRole
from jaxfleet.env.jobs import cluster_environment as cluster_environment
from jaxfleet.env.jobs import compiled_code_environment as compiled_code_environment
from jaxfleet.env.jobs import ended_file as ended_file
from jaxfleet.env.jobs import enter_environment as enter_environment
from jaxfleet.env.jobs import has_job_ended as has_job_ended
from jaxfleet.env.jobs import read_cloud_nodes as read_cloud_nodes
from jaxfleet.env.jobs import read_cluster as read_cluster
from jaxfleet.env.jobs import read_job as read_job
from jaxfleet.env.jobs import read_meeting_dir as read_meeting_dir
from jaxfleet.env.jobs import read_restart as read_restart
from jaxfleet.env.jobs import read_roles as read_roles
from jaxfleet.env.ranks import Rank as Rank
from jaxfleet.env.ranks import Started as Started
from jaxfleet.env.ranks import rank_environment as rank_environment
from jaxfleet.env.ranks import read_rank as read_rank
from jaxfleet.env.ranks import read_started as read_started
from jaxfleet.env.saves import PeriodicSaves as PeriodicSaves
from jaxfleet.env.saves import SaveInterval as SaveInterval
from jaxfleet.env.saves import periodic_saves_environment as periodic_saves_environment
from jaxfleet.env.saves import read_periodic_saves as read_periodic_saves
from jaxfleet.env.variables import Environment as Environment
from jaxfleet.env.variables import dumping_to as dumping_to
from jaxfleet.env.variables import prepend_python_path as prepend_python_path
from jaxfleet.env.variables import read_cache_dir as read_cache_dir
from jaxfleet.env.variables import read_environment as read_environment
from jaxfleet.env.variables import read_metrics_host as read_metrics_host
from jaxfleet.env.variables import read_metrics_port as read_metrics_port
from jaxfleet.env.variables import read_shows_progress as read_shows_progress
from jaxfleet.env.variables import read_trace_dir as read_trace_dir
