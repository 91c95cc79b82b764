"""Slices parameters into blocks for several servers."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from jaxfleet.analysis.optimizer_groups import OptimizerGroup, find_optimizer_groups
from jaxfleet.analysis.placement.policies import exact_rows, slice_rows, slicing_obstacle
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
