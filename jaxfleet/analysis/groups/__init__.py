"""Optimize groups: what updates each parameter, and where that may be cut."""

from jaxfleet.analysis.groups.cut import cut_rows as cut_rows
from jaxfleet.analysis.groups.find import optimize_groups as optimize_groups
from jaxfleet.analysis.groups.split import split_branches as split_branches
from jaxfleet.analysis.groups.verdict import Group as Group
from jaxfleet.analysis.groups.verdict import OptimizeGroups as OptimizeGroups
from jaxfleet.analysis.groups.verdict import Reason as Reason
from jaxfleet.analysis.groups.verdict import Rows as Rows
