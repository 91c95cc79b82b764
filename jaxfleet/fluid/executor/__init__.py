"""Executor: runs fluid programs, feeding and fetching by name."""

from jaxfleet.fluid.executor.dataset_runs import FetchHandler as FetchHandler
from jaxfleet.fluid.executor.executor import Executor as Executor
from jaxfleet.fluid.executor.fetching import as_numpy as as_numpy
from jaxfleet.fluid.scope import Scope as Scope
from jaxfleet.fluid.scope import global_scope as global_scope
from jaxfleet.fluid.scope import scope_guard as scope_guard
