"""Where variables of a job live: which rows of which one, at which server."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxfleet.fluid.variable import Variable


@dataclass(frozen=True)
class VarStruct:
    """What is said of a variable, without its block.

    Attributes:
        name: its own.
        shape: a number for each axis.
        dtype: its name.
        type: its kind.
        lod_level: how its rows nest.
        persistable: whether it outlives a run.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    type: str
    lod_level: int
    persistable: bool

    @classmethod
    def of(cls, var: Variable) -> "VarStruct":
        """Returns what is said of a variable."""
        return cls(var.name, var.shape, var.dtype, var.type, var.lod_level, var.persistable)


class VarDistributed:
    """One slice of a variable.

    Args:
        origin_var: the variable.
        slice_var: the slice.
        is_slice: whether it is less than the whole; what the shapes say, unless given.
        block_id: its number among the variable's.
        offset: its first element in the variable's.
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
        """Tells whether the same is said of two variables."""
        return _struct(var1) == _struct(var2)

    def __str__(self) -> str:
        whole = f"{self.origin.name}{list(self.origin.shape)}"
        part = f"{self.slice.name}{list(self.slice.shape)} from element {self.offset}"
        return f"{self.vtype} {whole}: {part} at {self.endpoint}"


class VarsDistributed:
    """All slices of the variables of a job.

    Attributes:
        distributed_vars: they.
        shared: what every server that updates has whole, by name one that has it: learning rates,
            and what their schedules keep.
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
        """Adds a slice; the arguments are those of `VarDistributed`."""
        made = VarDistributed(origin_var, slice_var, is_slice, block_id, offset, vtype, endpoint)
        self.distributed_vars.append(made)

    def get_distributed_var_by_slice(self, var_name: str) -> VarDistributed | None:
        """Returns the slice of that name; None where there is none."""
        return next((v for v in self.distributed_vars if v.slice.name == var_name), None)

    def get_distributed_var_by_origin_and_ep(
        self, origin_var_name: str, endpoint: str
    ) -> VarDistributed | None:
        """Returns what a server holds of a variable; None where it holds nothing of it."""
        found = self.get_distributed_vars_by_ep(endpoint)
        return next((v for v in found if v.origin.name == origin_var_name), None)

    def get_distributed_vars_by_vtypes(
        self, vtypes: list[str], groupby: bool = False
    ) -> list[VarDistributed] | dict[str, list[VarDistributed]]:
        """Returns the slices of some types.

        Args:
            vtypes: `Param`, `Optimizer`, `RemotePrefetch`.
            groupby: by the names of the variables that they are of.
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
        """Returns what a server holds, of one type if asked for."""
        return [
            v
            for v in self.distributed_vars
            if v.endpoint == endpoint and (vtype is None or v.vtype == vtype)
        ]

    def overview(self) -> str:
        """Returns all slices as text, one a line."""
        return "\n".join(map(str, self))

    def __iter__(self) -> Iterator[VarDistributed]:
        return iter(self.distributed_vars)


def _struct(var: Variable | VarStruct) -> VarStruct:
    return var if isinstance(var, VarStruct) else VarStruct.of(var)
