"""What servers hold and what travels: of the step as it is, and with other numbers of servers."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from jaxfleet.analysis.optimizer_groups import OptimizerGroup, OptimizerGroups
from jaxfleet.analysis.placement.policies import (
    METHODS,
    dispatch_slices,
    exact_rows,
    slice_loads,
    slicing_obstacle,
)
from jaxfleet.analysis.placement.sliced_layout import known_shape
from jaxfleet.analysis.placement.transfer_plan import TransferPlan, transfer_plan
from jaxfleet.ir import Attrs, Kind, Program
from jaxfleet.passes import SliceVar
from jaxfleet.report.facts import UNUSUAL
from jaxfleet.report.history import History
from jaxfleet.report.model import Traffic

SERVERS = (1, 2, 4, 8)  # the numbers that a report imagines
_TRAINERS = 2
_PLACING = frozenset({"slices", "placement", "endpoints"})


def traffic_of(history: History, groups: OptimizerGroups | None) -> Traffic:
    """Returns the plans of a step; none if it does not train, or parameters have open sizes."""
    stages = {stage.name: stage.program for stage in history.stages}
    placed, trainers = stages.get("dispatch"), _trainers(history.last)
    try:
        as_it_is = None
        if placed is not None:
            trainer = stages.get("insert_send_recv")
            as_it_is = transfer_plan(placed, trainers=trainers, trainer=trainer).to_json()
        source = history.stages[0].program
        if groups is None or (why := _why_none(source, groups)):
            return Traffic(as_it_is, why_none=why if groups is not None else "it does not train")
        plans = [_totals(plan) for plan in _imagined(source, groups, trainers)]
        return Traffic(as_it_is, plans)
    except UNUSUAL as error:
        return Traffic(why_none=str(error))


def _why_none(source: Program, groups: OptimizerGroups) -> str:
    if not source.of_kind(Kind.PARAM):
        return "it has no parameters"
    if not groups.groups:
        return "no optimizer updates its parameters, so servers would have nothing to do"
    return ""


def _trainers(program: Program) -> int:
    found = program.attrs.get("trainers")
    return found if isinstance(found, int) and found > 0 else _TRAINERS


def _imagined(source: Program, groups: OptimizerGroups, trainers: int) -> Iterator[TransferPlan]:
    """Yields the plan for each number of servers, with the options that `jaxfleet plan` has.

    The passes `slice_var` and `dispatch` would find the optimizer groups anew each time, which
    takes 3 s for 720 parameters.
    """
    bare = {name: value for name, value in source.attrs.items() if name not in _PLACING}
    for servers in SERVERS:
        endpoints = tuple(f"server {number}" for number in range(servers))
        slices = tuple((group.name, _rows(group, servers)) for group in groups.groups)
        sliced = replace(source, attrs=Attrs({**bare, "slices": slices}))
        loads = slice_loads(sliced, groups)
        placement = tuple(dispatch_slices(METHODS[0], loads, endpoints).items())
        attrs = sliced.attrs.updated(endpoints=endpoints, placement=placement)
        yield transfer_plan(replace(sliced, attrs=attrs), trainers=trainers, groups=groups)


def _rows(group: OptimizerGroup, servers: int) -> tuple[int, ...]:
    shape = known_shape(group.param)
    if slicing_obstacle(group) is not None:
        return shape[:1]
    return exact_rows(shape, servers, SliceVar.min_block_size)


def _totals(plan: TransferPlan) -> Mapping[str, Any]:
    """Returns a plan as data without its blocks, which are most of it."""
    found = plan.to_json()
    servers: Any = found["servers"]
    bare = [{name: x for name, x in server.items() if name != "blocks"} for server in servers]
    return {**found, "servers": bare, "whole": []}
