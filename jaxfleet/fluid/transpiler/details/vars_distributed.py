"""Placement of a job's variables: the rows of each variable on each server."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from jaxfleet.analysis.placement.sliced_layout import Slice, placement_of, slices_of
from jaxfleet.analysis.updates import Updates
from jaxfleet.fluid.framework.program import Program
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.ir import Kind
from jaxfleet.ir import Program as IrProgram


@dataclass(frozen=True)
class VarStruct:
    """The properties of a variable, without its block."""

    name: str  # the variable's name
    shape: tuple[int, ...]  # the size of each axis
    dtype: str  # its name
    type: str  # the kind of variable
    lod_level: int  # the number of levels of ragged rows
    persistable: bool  # whether it outlives a run

    @classmethod
    def of(cls, var: Variable) -> "VarStruct":
        return cls(var.name, var.shape, var.dtype, var.type, var.lod_level, var.persistable)


class VarDistributed:
    """One slice of a variable.

    Args:
        origin_var: the variable.
        slice_var: the slice.
        is_slice: whether it is less than the whole; derived from the shapes, unless given.
        block_id: its number among the variable's slices.
        offset: the position of its first element in the variable.
        vtype: `Param`, `Optimizer` or `RemotePrefetch`.
        endpoint: the server that holds it.
    """

    def __init__(
        self,
        origin_var: Variable | VarStruct,
        slice_var: Variable | VarStruct,
        is_slice: bool | None = None,
        block_id: int | None = None,
        offset: int | None = None,
        vtype: str | None = None,
        endpoint: str | None = None,
    ) -> None:
        self.origin, self.slice = _struct(origin_var), _struct(slice_var)
        differs = self.origin.shape != self.slice.shape
        self.is_slice = differs if is_slice is None else is_slice
        self.block_id, self.offset = block_id or 0, offset or 0
        self.vtype, self.endpoint = vtype, endpoint

    @staticmethod
    def equal(var1: Any, var2: Any) -> bool:
        """Whether two variables have the same properties."""
        return _struct(var1) == _struct(var2)

    def __str__(self) -> str:
        whole = f"{self.origin.name}{list(self.origin.shape)}"
        part = f"{self.slice.name}{list(self.slice.shape)} from element {self.offset}"
        return f"{self.vtype} {whole}: {part} at {self.endpoint}"


class VarsDistributed:
    """All slices of the variables of a job.

    `shared` maps variables that every updating server holds whole (learning rates, and the state of
    their schedules) to one such server.
    """

    def __init__(self) -> None:
        self.distributed_vars: list[VarDistributed] = []
        self.shared: dict[str, str] = {}

    def add_distributed_var(
        self,
        origin_var: Variable | VarStruct,
        slice_var: Variable | VarStruct,
        is_slice: bool | None = None,
        block_id: int | None = None,
        offset: int | None = None,
        vtype: str | None = None,
        endpoint: str | None = None,
    ) -> None:
        """Adds a slice; arguments as `VarDistributed`."""
        made = VarDistributed(origin_var, slice_var, is_slice, block_id, offset, vtype, endpoint)
        self.distributed_vars.append(made)

    def get_distributed_var_by_slice(self, var_name: str) -> VarDistributed | None:
        """Returns the slice of a name; None if there is none."""
        return next((v for v in self.distributed_vars if v.slice.name == var_name), None)

    def get_distributed_var_by_origin_and_ep(
        self, origin_var_name: str, endpoint: str
    ) -> VarDistributed | None:
        """Returns a server's slice of a variable; None if it holds none of it."""
        found = self.get_distributed_vars_by_ep(endpoint)
        return next((v for v in found if v.origin.name == origin_var_name), None)

    def get_distributed_vars_by_vtypes(
        self, vtypes: list[str], groupby: bool = False
    ) -> list[VarDistributed] | dict[str, list[VarDistributed]]:
        """Returns the slices of some types: `Param`, `Optimizer`, `RemotePrefetch`.

        With `groupby` they are grouped by the names of the original variables.
        """
        found = [v for v in self.distributed_vars if v.vtype in vtypes]
        if not groupby:
            return found
        grouped: dict[str, list[VarDistributed]] = {}
        for var in found:
            grouped.setdefault(var.origin.name, []).append(var)
        return grouped

    def get_distributed_vars_by_ep(
        self, endpoint: str, vtype: str | None = None
    ) -> list[VarDistributed]:
        """Returns the slices on a server, optionally of one type."""
        return [
            v
            for v in self.distributed_vars
            if v.endpoint == endpoint and (vtype is None or v.vtype == vtype)
        ]

    def overview(self) -> str:
        """Returns all slices as text, one per line."""
        return "\n".join(map(str, self))

    def __iter__(self) -> Iterator[VarDistributed]:
        return iter(self.distributed_vars)


def _struct(var: Variable | VarStruct) -> VarStruct:
    return var if isinstance(var, VarStruct) else VarStruct.of(var)


_NOT_STATE = ("Param", "Grad", "LearningRate")


def vars_distributed_of(
    main: Program, placed: IrProgram, *, has_state: bool = True
) -> VarsDistributed:
    """Returns the slices of all parameters and of their optimizer state.

    Without `has_state` trainers update, and servers hold only parameters.
    """
    found, updates, placement = VarsDistributed(), Updates(placed), placement_of(placed)
    for cut in slices_of(placed):
        is_remote = has_state and cut.param in updates.prefetched
        kind = "RemotePrefetch" if is_remote else "Param"
        origin = VarStruct.of(main.global_block().var(cut.param))
        part = replace(origin, name=cut.name, shape=cut.shape)
        _add(found, origin, part, cut, kind, placement[cut.name])
        for name in _state(updates, cut.param) if has_state else ():
            like = VarStruct.of(main.global_block().var(name))
            is_cut = like.shape == origin.shape
            held = replace(like, shape=cut.shape) if is_cut else like
            _add(found, like, held, cut, "Optimizer", placement[cut.name])
        for name in _shared(placed, updates, cut.param) if has_state else ():
            found.shared.setdefault(name, placement[cut.name])
    return found


def _shared(placed: IrProgram, updates: Updates, param: str) -> Iterator[str]:
    """Yields the persistable variables of a parameter's learning rate or its schedule."""
    names = [name for op in updates.schedule for name in (*op.reads, *op.writes)]
    names += [str(n) for op in updates.of(param) for n in op.inputs.slot("LearningRate")]
    known = {v.name for v in placed.of_kind(Kind.STATE)}
    yield from (name for name in dict.fromkeys(names) if name in known)


def _state(updates: Updates, param: str) -> Iterator[str]:
    """Yields the state of an update besides the parameter."""
    for op in updates.of(param):
        slots = dict(op.inputs.slots)
        if "Param" in slots:
            for slot, names in slots.items():
                yield from (str(name) for name in names if slot not in _NOT_STATE)


def _add(
    found: VarsDistributed, origin: VarStruct, part: VarStruct, cut: Slice, kind: str, at: str
) -> None:
    is_slice = origin.shape != part.shape
    offset = cut.start * prod(origin.shape[1:]) if is_slice else 0
    block = cut.index if is_slice else 0
    found.add_distributed_var(origin, part, is_slice, block, offset, kind, at)
