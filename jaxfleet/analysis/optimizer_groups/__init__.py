"""Optimizer groups: the operators that update each parameter, and where they may be cut."""

from jaxfleet.analysis.optimizer_groups.branches import split_branches as split_branches
from jaxfleet.analysis.optimizer_groups.group_analysis import (
    find_optimizer_groups as find_optimizer_groups,
)
from jaxfleet.analysis.optimizer_groups.result import OptimizerGroup as OptimizerGroup
from jaxfleet.analysis.optimizer_groups.result import OptimizerGroups as OptimizerGroups
from jaxfleet.analysis.optimizer_groups.result import Reason as Reason
from jaxfleet.analysis.optimizer_groups.result import RowLocality as RowLocality
from jaxfleet.analysis.optimizer_groups.row_slice import cut_rows as cut_rows
