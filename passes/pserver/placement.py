"""Placement of parameters on servers: cuts them into blocks, and assigns these to servers."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxfleet.analysis.optimizer_groups import OptimizerGroup, find_optimizer_groups
from jaxfleet.analysis.placement.policies import (
    MAX_IMBALANCE,
    METHODS,
    LoadBalance,
    SliceLoad,
    bare_slice_loads,
    dispatch_slices,
    exact_rows,
    slice_loads,
    slice_rows,
    slicing_obstacle,
)
from jaxfleet.analysis.placement.sliced_layout import known_shape
from jaxfleet.analysis.updates import Updates, is_fluid_dialect
from jaxfleet.errors import PassError
from jaxfleet.ir import Program, Variable, block_name
from jaxfleet.pipeline import Pass, register_pass


@register_pass("slice_var")
@dataclass(frozen=True)
class SliceVar(Pass):
    """Decides along which rows each parameter is cut, so that every server can hold some.

    A whole parameter keeps one server busy and the others waiting. The rule is fluid's: as many
    blocks as servers, none with less than `min_block_size` elements, all of them whole rows; and
    none has a single element, which XLA would compute differently. A parameter is cut only if its
    update, analyzed operator by operator, gives exactly the same result on some rows as on all: a
    norm over the rows, or a factored second moment, keeps it whole. In fluid's dialect the type of
    the update operator decides, by fluid's rule.

    Gradients are cut like their parameter, and so is the optimizer's state: leaves with as many
    rows as the parameter are cut along the same rows, scalars are copied to each block. This is
    derived, not recorded. The pass itself changes no operator: it writes `slices`, the rows of
    every parameter's blocks, which `dispatch` and `insert_send_recv` read.

    Before::

        program p
          data  x: f32[128,200]
          param b: f32[200]
          param w: f32[128,200]
          block 0
            backward
              b@GRAD: f32[200] = jax.reduce_sum(x) {axes=[0]} for (b, b@GRAD)
              w@GRAD: f32[128,200] = jax.neg(x) for (w, w@GRAD)
            optimize
              b = jax.sub(b, b@GRAD)
              w = jax.sub(w, w@GRAD)

    After::

        program p {slices=[["b", [200]], ["w", [64, 64]]]}
          data  x: f32[128,200]
          param b: f32[200]
          param w: f32[128,200]
          block 0
            backward
              b@GRAD: f32[200] = jax.reduce_sum(x) {axes=[0]} for (b, b@GRAD)
              w@GRAD: f32[128,200] = jax.neg(x) for (w, w@GRAD)
            optimize
              b = jax.sub(b, b@GRAD)
              w = jax.sub(w, w@GRAD)

    Examples:
        A slice has at least `min_block_size` elements, so that a small number divides more:

        >>> from jaxfleet.ir import parse
        >>> from jaxfleet.passes import SliceVar
        >>> from jaxfleet.testing import docstring_programs
        >>> program = parse(docstring_programs(SliceVar)[0][0])
        >>> SliceVar(servers=3, min_block_size=100).run(program).attrs["slices"]
        (('b', (100, 100)), ('w', (43, 43, 42)))
        >>> SliceVar(slice=False).run(program).attrs["slices"]
        (('b', (200,)), ('w', (128,)))
    """

    servers: int = 2  # the most blocks of a parameter
    min_block_size: int = 8192  # the minimum elements of a block, except for rounding
    slice: bool = True  # false keeps every parameter whole

    def __post_init__(self) -> None:
        for name, value in (("servers", self.servers), ("min_block_size", self.min_block_size)):
            if value < 1:
                raise PassError(f"slice_var: {name} is {value}, but must be at least 1")

    def run(self, program: Program) -> Program:
        for attr in ("slices", "placement"):
            if attr in program.attrs:
                what = f"slice_var: program '{program.name}' is already cut: it has '{attr}'"
                raise PassError(what, hint="run it once, on a captured step")
        found = self._by_roles(program) if is_fluid_dialect(program) else self._by_groups(program)
        return replace(program, attrs=program.attrs.updated(slices=found))

    def _by_roles(self, program: Program) -> tuple[tuple[str, tuple[int, ...]], ...]:
        updates = Updates(program)
        return tuple(
            (param, self._fluids_rows(updates.variable(param), cut=updates.is_cuttable(param)))
            for param, _ in updates.pairs
        )

    def _fluids_rows(self, param: Variable, *, cut: bool) -> tuple[int, ...]:
        shape = known_shape(param)
        servers = self.servers if self.slice and cut else 1
        return slice_rows(shape, servers, self.min_block_size)

    def _by_groups(self, program: Program) -> tuple[tuple[str, tuple[int, ...]], ...]:
        groups = find_optimizer_groups(program)
        if not groups.groups:
            what = f"slice_var: program '{program.name}' has no parameters"
            hint = "servers hold what an optimizer in jf.distributed_optimizer updates"
            raise PassError(what, hint=hint)
        taken = program.variables.keys()
        return tuple((group.name, self._rows(group, taken)) for group in groups.groups)

    def _rows(self, group: OptimizerGroup, taken: Collection[str]) -> tuple[int, ...]:
        shape = known_shape(group.param)
        if not self.slice or slicing_obstacle(group) is not None:
            return shape[:1]
        rows = exact_rows(shape, self.servers, self.min_block_size)
        # A block's name may be the user's name of another parameter.
        names = {block_name(group.name, index) for index in range(len(rows))}
        return rows if names.isdisjoint(taken) else shape[:1]


_FIRST_PORT = 6174  # fluid's
_LAST_PORT = 65535
_LITTLE_BYTES = 1 << 20  # in total: negligible work for a server
_WORTH_IT = 0.9  # of the fullest server's bytes: a smaller improvement does not count


@register_pass("dispatch")
@dataclass(frozen=True)
class Dispatch(Pass):
    """Places every block of a parameter, with its optimizer state, on a server.

    `round_robin` cycles through the servers, as fluid does, which is even if parameters are cut.
    `hash_name` uses the CRC-32 of a block's name: a block's server does not depend on other blocks,
    so it stays when layers are added. `balanced` assigns the largest blocks first, each to the
    least loaded server, which is even if large parameters stay whole.

    A step waits for its fullest server. A load of more than `max_imbalance` times the mean is
    rejected if `balanced` would do better, since it multiplies the time of the servers' work. A
    single block cannot be spread and small parameters take no time, so neither is rejected.
    Programs in fluid's dialect are placed as in fluid, however unevenly. Runs after `slice_var`.

    Before::

        program p {slices=[["b", [200]], ["w", [64, 64]]]}
          data  x: f32[128,200]
          param b: f32[200]
          param w: f32[128,200]
          block 0
            backward
              b@GRAD: f32[200] = jax.reduce_sum(x) {axes=[0]} for (b, b@GRAD)
              w@GRAD: f32[128,200] = jax.neg(x) for (w, w@GRAD)
            optimize
              b = jax.sub(b, b@GRAD)
              w = jax.sub(w, w@GRAD)

    After::

        program p {endpoints=["127.0.0.1:6174", "127.0.0.1:6175"], placement=[["b", "127.0.0.1:6174"], ["w.block0", "127.0.0.1:6175"], ["w.block1", "127.0.0.1:6174"]], slices=[["b", [200]], ["w", [64, 64]]]}
          data  x: f32[128,200]
          param b: f32[200]
          param w: f32[128,200]
          block 0
            backward
              b@GRAD: f32[200] = jax.reduce_sum(x) {axes=[0]} for (b, b@GRAD)
              w@GRAD: f32[128,200] = jax.neg(x) for (w, w@GRAD)
            optimize
              b = jax.sub(b, b@GRAD)
              w = jax.sub(w, w@GRAD)

    Examples:
        The method decides which server has more, here of 12,800 and 200 elements:

        >>> from jaxfleet.ir import parse
        >>> from jaxfleet.passes import Dispatch
        >>> from jaxfleet.testing import docstring_programs
        >>> program = parse(docstring_programs(Dispatch)[0][0])
        >>> ends = ("ps0:6174", "ps1:6174")
        >>> Dispatch(ends, method="round_robin").run(program).attrs["placement"]
        (('b', 'ps0:6174'), ('w.block0', 'ps1:6174'), ('w.block1', 'ps0:6174'))
        >>> Dispatch(ends, method="balanced").run(program).attrs["placement"]
        (('b', 'ps0:6174'), ('w.block0', 'ps0:6174'), ('w.block1', 'ps1:6174'))
    """  # noqa: E501  # a program's attributes are one line

    endpoints: tuple[str, ...] = ()  # host:port of each server; port 0: any free port
    servers: int = 2  # on local ports from 6174, without endpoints
    method: str = "round_robin"  # or hash_name, or balanced
    max_imbalance: float = MAX_IMBALANCE  # of the fullest server, over the mean; 0: no limit
    given: tuple[str, ...] = ()  # the endpoint of each slice in order, instead of a method
    shuffle_seed: int = -1  # places slices in a random order, as fluid does; -1: in their own order

    runs_after = ("slice_var",)

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            what = f"dispatch: method is '{self.method}'"
            raise PassError(what, hint=f"choose one of {', '.join(METHODS)}")
        if not 1 <= self.servers <= _LAST_PORT - _FIRST_PORT:
            raise PassError(f"dispatch: servers is {self.servers}, but must be at least 1")
        if self.max_imbalance != 0 and not self.max_imbalance >= 1:
            what = f"dispatch: max_imbalance is {self.max_imbalance}"
            raise PassError(what, hint="it is at least 1, or 0 to allow anything")
        _check_endpoints(self.endpoints)

    def run(self, program: Program) -> Program:
        if "placement" in program.attrs:
            what = f"dispatch: program '{program.name}' is already placed"
            raise PassError(what, hint="run it once, after slice_var")
        endpoints = self.endpoints or local_endpoints(self.servers)
        parts = self._parts(program)
        placed = self._placed(parts, endpoints)
        if not is_fluid_dialect(program):
            self._check_balance(parts, endpoints, LoadBalance.of(parts, placed, endpoints))
        placement = tuple((part.slice.name, placed[part.slice.name]) for part in parts)
        attrs = program.attrs.updated(endpoints=endpoints, placement=placement)
        return replace(program, attrs=attrs)

    def _placed(self, parts: Sequence[SliceLoad], endpoints: Sequence[str]) -> dict[str, str]:
        if not self.given:
            return dispatch_slices(self.method, self._in_order(parts), endpoints)
        if len(self.given) != len(parts) or not set(self.given) <= set(endpoints):
            what = f"dispatch: given places {len(self.given)} slices of {len(parts)}"
            raise PassError(what, hint=f"name one of {', '.join(endpoints)} for each")
        return {part.slice.name: at for part, at in zip(parts, self.given, strict=True)}

    def _parts(self, program: Program) -> tuple[SliceLoad, ...]:
        if is_fluid_dialect(program):
            return bare_slice_loads(program)
        return slice_loads(program, find_optimizer_groups(program))

    def _in_order(self, parts: Sequence[SliceLoad]) -> Sequence[SliceLoad]:
        """Returns the slices in placement order, a parameter's slices together."""
        if self.shuffle_seed < 0:
            return parts
        params = list(dict.fromkeys(part.slice.param for part in parts))
        np.random.RandomState(self.shuffle_seed).shuffle(params)  # the same in every process
        return [part for param in params for part in parts if part.slice.param == param]

    def _check_balance(
        self, parts: Sequence[SliceLoad], endpoints: Sequence[str], balance: LoadBalance
    ) -> None:
        even = not self.max_imbalance or balance.ratio <= self.max_imbalance
        if even or balance.total < _LITTLE_BYTES:
            return
        best = LoadBalance.of(parts, dispatch_slices("balanced", parts, endpoints), endpoints)
        if best.fullest > _WORTH_IT * balance.fullest:
            return
        held = ", ".join(f"{name} {size:,}" for name, size in balance.held_bytes.items())
        what = (
            f"dispatch: {self.method} puts {balance.ratio:.2f} times the mean on one server, "
            f"more than max_imbalance={self.max_imbalance:g}; bytes: {held}"
        )
        hint = (
            f"method=balanced puts {best.ratio:.2f} times the mean there; "
            "slice_var with a smaller min_block_size makes more blocks; max_imbalance=0 allows it"
        )
        raise PassError(what, hint=hint)


def local_endpoints(servers: int) -> tuple[str, ...]:
    """Returns endpoints of this machine for `servers` servers, on ports from fluid's first."""
    return tuple(f"127.0.0.1:{_FIRST_PORT + place}" for place in range(servers))


def _check_endpoints(endpoints: Sequence[str]) -> None:
    for endpoint in endpoints:
        host, _, port = endpoint.rpartition(":")
        if not host or not (port.isascii() and port.isdigit() and int(port) <= _LAST_PORT):
            what = f"dispatch: '{endpoint}' is not an endpoint"
            raise PassError(what, hint="give host:port, such as 127.0.0.1:6174")
        if endpoints.count(endpoint) > 1:
            what = f"dispatch: endpoint '{endpoint}' is given twice"
            raise PassError(what, hint="each server has its own")
