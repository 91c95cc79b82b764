"""Local steps on each device, and periodic averaging of parameters: LocalSGD, DiLoCo, AdaComm."""

from dataclasses import dataclass, replace

from jaxfleet.analysis.flow import Flow
from jaxfleet.analysis.sharding import (
    VARYING,
    Mesh,
    ShardingPlan,
    StateSharding,
    mesh_of,
    propagate,
)
from jaxfleet.errors import PassError
from jaxfleet.ir import Block, Kind, Operator, Program, Role, Variable, parse
from jaxfleet.ir.inline import Embedded, embed
from jaxfleet.ir.naming import grad_name, snapshot_name
from jaxfleet.passes.building_blocks import (
    conditional,
    conversion,
    identity_block,
    literal,
    periodic_condition,
    update_op,
    with_extra_variables,
)
from jaxfleet.passes.collective.spmd_partitioner import check_devices, device_program
from jaxfleet.pipeline import Pass, made_by, register_pass


@register_pass("train_apart")
@dataclass(frozen=True)
class TrainApart(Pass):
    """Makes each device update its own state from its own rows.

    As `grad_allreduce`, but a sum over the batch that reaches the state stays local, scaled up to
    stand for the whole batch's. State that then differs between devices is `own`: every device
    keeps its own from step to step. Other state (a step count, a dropout key) is replicated.
    Metrics cover all devices, by an all-reduce.

    Devices drift apart until they `meet`.

    Before::

        program p {batch=<b>}
          data  x: f32[b,4]
          param w: f32[4]
          block 0
            forward
              total: f32[] = jax.reduce_sum(x) {axes=[0, 1]}
            backward
              w@GRAD: f32[4] = jax.reduce_sum(x) {axes=[0]} for (w, w@GRAD)
            optimize
              w = jax.sub(w, w@GRAD)
              fetch(total)

    After::

        program p {batch=<b>, devices=2, own=["w"], sharded=[["x", 0]]}
          data  x: f32[b,4]
          param w: f32[4]
          block 0
            forward
              total: f32[] = jax.reduce_sum(x) {axes=[0, 1]}
              total = c_allreduce_sum(total) {ring_id=0}
            backward
              w@GRAD: f32[4] = jax.reduce_sum(x) {axes=[0]}
              w@GRAD = c_local(w@GRAD) {devices=2} for (w, w@GRAD)
            optimize
              w = jax.sub(w, w@GRAD)
              fetch(total)
    """

    devices: int = 2  # devices that train

    def run(self, program: Program) -> Program:
        check_devices(program, self.name, self.devices)
        mesh, cut = mesh_of(program, self.devices)
        held, plan = plan_apart(program, mesh, cut)
        return device_program(program, plan, mesh, cut, lambda op: made_by(op, self), held=held)


def plan_apart(
    program: Program, mesh: Mesh, cut: dict[str, int]
) -> tuple[StateSharding, ShardingPlan]:
    """Returns the state that diverges between devices, and the plan of the step with it."""
    local = _reaching_state(program, mesh)
    held = StateSharding()
    while True:
        plan = propagate(program, mesh, sharded_inputs=cut, local=local, held=held)
        final = plan.blocks[0].final
        state = [v.name for v in program.of_kind(Kind.PARAM, Kind.STATE)]
        own = [name for name in state if name in held.state or final[name] == VARYING]
        if len(own) == len(held.state):
            return held, plan
        held = StateSharding(dict.fromkeys(own, VARYING))


def _reaching_state(program: Program, mesh: Mesh) -> frozenset[tuple[int, int]]:
    """Returns the operators, by block and index, that the new state depends on.

    Excludes those that make rows of all devices out of summands, as the gradient of `x[indices]`
    does: these do not sum over the batch, so a device's own part cannot stand for the whole.
    """
    flow = Flow.of(program)
    names = [v.name for v in program.of_kind(Kind.PARAM, Kind.STATE)]
    ends = {flow.final[name] for name in names if name in flow.final}
    found = ends | flow.reaching(ends, lambda _: True)
    places = {(value.block, value.place) for value in found if value.place >= 0}
    return frozenset(at for at in places if not _makes_rows(program, mesh, *at))


def _makes_rows(program: Program, mesh: Mesh, index: int, place: int) -> bool:
    block = program.blocks[index]
    op = block.ops[place]
    if op.role_var:
        return False
    sizes = [size for name in op.writes for size in program.lookup(name, block).shape]
    return any(mesh.has_letter(size) or size == mesh.rows for size in sizes)


_NAME = "meet"
_PERIOD = f"{_NAME}.every"  # of AdaComm
_LOSSES = f"{_NAME}.losses"  # the sum of losses since the last meeting
_FIRST = f"{_NAME}.first"  # the mean loss until the first meeting; 0 before it


def _adacomm_state(every: int) -> list[tuple[Variable, str | int | float]]:
    """Returns the variables kept between steps, with their initial values."""
    return [
        (Variable(_PERIOD, "i32", (), Kind.STATE), every),
        (Variable(_LOSSES, "f32", (), Kind.STATE), 0.0),
        (Variable(_FIRST, "f32", (), Kind.STATE), 0.0),
    ]


def _adacomm_update(loss: str, every: int) -> tuple[list[Operator], list[Variable]]:
    """Returns operators, and their temporaries, for the steps until the next meeting.

    They compute it when a meeting ends this step:

    `ceil(sqrt(F / F0) * every)`, with F the mean loss since the last meeting and F0 that until the
    first; from 1 to `every` (Wang and Joshi 2019, equation 14). If that is not finite, the period
    is unchanged, and F0 is taken from a later meeting. `loss` is a variable of block 0, f32[].
    """
    declared: list[Variable] = []

    def new(name: str, dtype: str = "f32") -> str:
        declared.append(Variable(f"{_NAME}.{name}", dtype, ()))
        return declared[-1].name

    ops = [
        update_op("jax.add", (_LOSSES, loss), (total := new("total"),)),
        conversion(f"{_NAME}.more", steps := new("gone"), "f32"),
        update_op("jax.div", (total, steps), (mean := new("mean"),)),
        update_op("jax.eq", (_FIRST, literal(0)), (is_first := new("fresh", "bool"),)),
        update_op("jax.select_n", (is_first, _FIRST, mean), (known := new("known"),)),
        update_op("jax.div", (mean, known), (fallen := new("fallen"),)),
        update_op("jax.sqrt", (fallen,), (root := new("root"),)),
        update_op("jax.mul", (root, literal(every)), (exact := new("exact"),)),
        update_op("jax.ceil", (exact,), (up := new("up"),)),
        update_op("jax.min", (up, literal(every)), (least := new("least"),)),
        update_op("jax.max", (least, literal(1)), (following := new("next"),)),
        conversion(following, period := new("period", "i32"), "i32"),
        update_op("jax.is_finite", (root,), (is_sane := new("sane", "bool"),)),
        update_op("jax.and", (f"{_NAME}.due", is_sane), (changes := new("changes", "bool"),)),
        update_op("jax.select_n", (changes, _PERIOD, period), (_PERIOD,)),
        update_op("jax.select_n", (changes, _FIRST, known), (_FIRST,)),
        update_op("jax.select_n", (f"{_NAME}.due", total, literal(0)), (_LOSSES,)),
    ]
    return ops, declared


_PARTS = ("OWN", "OLD", "WAY", "MEAN", "MET")
_COUNT = f"{_NAME}.steps"  # steps since the last meeting


@register_pass("meet")
@dataclass(frozen=True)
class Meet(Pass):
    """Averages all devices' parameters after every `every` steps (LocalSGD).

    A parameter's snapshot is its common value at the last meeting. At a meeting the mean difference
    to the devices' values is subtracted from it, and all devices continue from the result, as
    `local_sgd` does for fluid's programs. The user sees the snapshot. Optimizer moments and batch
    statistics stay per device.

    With `outer` the mean difference is a gradient, with which an outer optimizer updates the common
    parameters (DiLoCo, Douillard et al. 2023); its state is kept beside the step's. Plain SGD with
    a rate of 1 gives the mean.

    With `loss` devices meet more often the further the loss has fallen (AdaComm, Wang and Joshi
    2019): early on, coarse progress suffices; in the end, differences between devices dominate.

    With `every` 1 they meet at each step, which with plain SGD equals one device with the whole
    batch. Runs after `train_apart`.

    Before::

        program p {batch=<b>, devices=2, own=["w"], sharded=[["x", 0]]}
          data  x: f32[b,4]
          param w: f32[4]
          block 0
            backward
              w@GRAD: f32[4] = jax.reduce_sum(x) {axes=[0]}
              w@GRAD = c_local(w@GRAD) {devices=2} for (w, w@GRAD)
            optimize
              w = jax.sub(w, w@GRAD)

    After::

        program p {batch=<b>, beside=[["meet.steps", 0], ["w@SNAPSHOT", "w"]], devices=2, own=["w"], sharded=[["x", 0]], shows=[["w", "w@SNAPSHOT"]]}
          data  x: f32[b,4]
          param w: f32[4]
          state meet.steps: i32[]
          state w@SNAPSHOT: f32[4]
          block 0
            backward
              w@GRAD: f32[4] = jax.reduce_sum(x) {axes=[0]}
              w@GRAD = c_local(w@GRAD) {devices=2} for (w, w@GRAD)
            optimize
              w = jax.sub(w, w@GRAD)
              meet.more: i32[] = jax.add(meet.steps, 1:i32)
              meet.due: bool[] = jax.ge(meet.more, 4:i32)
              meet.index: i32[] = jax.convert_element_type(meet.due) {new_dtype=i32, weak_type=false}
              meet.steps = jax.select_n(meet.due, meet.more, 0:i32)
              w, w@SNAPSHOT = jax.cond(meet.index, w, w@SNAPSHOT) {branches=[^1, ^2]}
          block 1 (w@KEPT: f32[4], w@SNAPSHOT@KEPT: f32[4]) -> (w@KEPT, w@SNAPSHOT@KEPT)
          block 2 (w@OWN: f32[4], w@OLD: f32[4]) -> (w@MET, w@MET)
            optimize
              w@WAY: f32[4] = jax.sub(w@OLD, w@OWN)
              w@MEAN: f32[4] = c_allreduce_avg(w@WAY) {ring_id=0}
              w@MET: f32[4] = jax.sub(w@OLD, w@MEAN)
    """  # noqa: E501  # attributes stand on one line

    every: int = 4  # steps between meetings
    loss: str = ""  # a scalar; as it falls, fewer steps than `every`
    outer: str = ""  # text of a program that updates parameters by `w@GRAD`, the mean difference

    runs_after = ("train_apart",)

    def __post_init__(self) -> None:
        if self.every < 1:
            raise PassError(f"meet: every {self.every} steps", hint="every is at least 1")

    def run(self, program: Program) -> Program:
        own = program.attrs.get("own", ())
        assert isinstance(own, tuple)
        params = [v for v in program.of_kind(Kind.PARAM) if v.name in own]
        if not params:
            what = f"{self.name}: no parameter is a device's own"
            raise PassError(what, hint="run train_apart before meet")
        kept = [replace(p, name=snapshot_name(p.name), kind=Kind.STATE) for p in params]
        pairs = list(zip(params, kept, strict=True))
        begins: list[tuple[Variable, str | int | float]]
        begins = [(Variable(_COUNT, "i32", (), Kind.STATE), 0), *((v, p.name) for p, v in pairs)]
        outer = self._outer([p.name for p in params])
        adaptive = _adacomm_state(self.every) if self.loss else []
        held = with_extra_variables(program, [*begins, *adaptive, *outer.begins])
        at = len(program.blocks)
        names = [*(x.name for pair in pairs for x in pair), *(v.name for v, _ in outer.begins)]
        still = identity_block([(x, held.variables[x]) for x in names], index=at)
        meeting, inner = self._meeting(params, outer, index=at + 1)
        every = _PERIOD if self.loss else literal(self.every, "i32")
        ops, declared, index = periodic_condition(_COUNT, every, _NAME)
        if self.loss:
            self._check_loss(program)
            adapting, temporaries = _adacomm_update(self.loss, self.every)
            ops, declared = [*ops, *adapting], [*declared, *temporaries]
        new = [made_by(x, self) for x in (*ops, conditional(index, names, (at, at + 1)))]
        root = held.root.with_ops([*held.root.ops, *new], declare=declared)
        attrs = held.attrs.updated(shows=tuple((p.name, v.name) for p, v in pairs))
        blocks = (root, *held.blocks[1:], still, meeting, *inner)
        return replace(held, blocks=blocks, attrs=attrs)

    def _meeting(
        self, params: list[Variable], outer: "_Outer", *, index: int
    ) -> tuple[Block, tuple[Block, ...]]:
        """Returns the block of a meeting: reads own values and snapshots, returns new ones."""
        ops: list[Operator] = []
        variables: dict[str, Variable] = {}
        args: list[str] = []
        results: list[str] = []
        for param in params:
            own, old, way, mean, new = (f"{param.name}@{part}" for part in _PARTS)
            used = (own, old, way, mean) if outer.program else (own, old, way, mean, new)
            variables |= {name: Variable(name, param.dtype, param.shape) for name in used}
            ops.append(update_op("jax.sub", (old, own), (way,)))
            ops.append(update_op("c_allreduce_avg", (way,), (mean,), ring_id=0))
            args += [own, old]
            results += [old, old] if outer.program else [new, new]
            if outer.program is None:
                ops.append(update_op("jax.sub", (old, mean), (new,)))
        inner: tuple[Block, ...] = ()
        if outer.program is not None:
            embedded = outer.embedded(params, index=index)
            variables |= {v.name: replace(v, kind=Kind.TEMP) for v in embedded.variables.values()}
            variables |= embedded.root.variables
            ops += [replace(x, role=Role.OPTIMIZE) for x in embedded.root.ops]
            kept = [f"{v.name}@OLD" for v, _ in outer.begins]
            args, results, inner = [*args, *kept], [*results, *kept], embedded.inner
        made = tuple(made_by(x, self) for x in ops)
        return Block(index, 0, variables, tuple(args), made, tuple(results)), inner

    def _check_loss(self, program: Program) -> None:
        variable = program.root.variables.get(self.loss)
        if variable is None or (variable.dtype, variable.shape) != ("f32", ()):
            what = f"{self.name}: '{self.loss}' is not a number in float32 that block 0 computes"
            raise PassError(what, hint="loss names a metric that is the loss of all rows")

    def _outer(self, params: list[str]) -> "_Outer":
        if not self.outer:
            return _Outer(None, ())
        program = parse(self.outer)
        known = {v.name for v in program.of_kind(Kind.PARAM)}
        if known != set(params):
            what = f"{self.name}: outer updates {sorted(known)}, and devices train {sorted(params)}"
            raise PassError(what, hint="make it for the parameters that devices train")
        begins: object = program.attrs.get("beside", ())
        assert isinstance(begins, tuple)
        return _Outer(program, tuple((program.variables[name], begin) for name, begin in begins))


@dataclass(frozen=True)
class _Outer:
    """An outer optimizer, applied to the mean difference, with its state and initial values.

    Without a program the mean difference is subtracted.
    """

    program: Program | None
    begins: tuple[tuple[Variable, str | int | float], ...]

    def embedded(self, params: list[Variable], *, index: int) -> Embedded:
        assert self.program is not None
        names = {v.name: f"{v.name}@OLD" for v in (*params, *(v for v, _ in self.begins))}
        names |= {grad_name(p.name): f"{p.name}@MEAN" for p in params}
        temporaries = [name for block in self.program.blocks for name in block.variables]
        names |= {name: f"outer/{name}" for name in temporaries}
        return embed(
            self.program, index=index, inner_from=index + 1, parent=0, names=names, sizes={}
        )
