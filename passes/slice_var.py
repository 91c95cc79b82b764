"""Cut parameters into blocks that several servers hold."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from jaxfleet.analysis.groups import Group, optimize_groups
from jaxfleet.analysis.slices import known_shape
from jaxfleet.analysis.slicing import exact_rows, obstacle, slice_rows
from jaxfleet.analysis.updates import Updates, says_by_roles
from jaxfleet.errors import PassError
from jaxfleet.ir import Program, Variable, block_name
from jaxfleet.pipeline import Pass, register_pass


@register_pass("slice_var")
@dataclass(frozen=True)
class SliceVar(Pass):
    """Decides along which rows each parameter is cut, so that every server can hold some.

    A parameter on one server keeps that server busy and the others waiting. The rule is fluid's:
    as many blocks as servers, none with less than `min_block_size` elements, all of them whole
    rows; and none has a single element, which XLA would compute otherwise than many. A parameter
    is cut only where its update, read operator by operator, gives on some rows exactly what it
    gives there on all: a norm over the rows, or a factored second moment, keeps it whole. In
    fluid's dialect the type of the operator that updates it says so, and fluid's rule is all.

    Its gradients are cut as it is, and so is its optimizer's state: leaves with as many rows as
    the parameter are cut along the same rows, scalars are not, and each block has its own. Nothing
    is written down of that, since it follows. The pass itself changes no operator: it writes
    `slices`, the rows of every parameter's blocks, which `dispatch` and `insert_send_recv` read.

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
    min_block_size: int = 8192  # the fewest elements of a block, but for what rounding leaves
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
        found = self._by_roles(program) if says_by_roles(program) else self._by_groups(program)
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
        groups = optimize_groups(program)
        if not groups.groups:
            what = f"slice_var: program '{program.name}' has no parameters"
            hint = "servers hold what an optimizer in jf.distributed_optimizer updates"
            raise PassError(what, hint=hint)
        taken = program.variables.keys()
        return tuple((group.name, self._rows(group, taken)) for group in groups.groups)

    def _rows(self, group: Group, taken: Collection[str]) -> tuple[int, ...]:
        shape = known_shape(group.param)
        if not self.slice or obstacle(group) is not None:
            return shape[:1]
        rows = exact_rows(shape, self.servers, self.min_block_size)
        # What a block would be called may be the user's name of another parameter.
        names = {block_name(group.name, index) for index in range(len(rows))}
        return rows if names.isdisjoint(taken) else shape[:1]
