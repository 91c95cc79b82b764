"""Bring devices together that train by themselves: LocalSGD."""

from dataclasses import dataclass, replace

from jaxfleet.errors import PassError
from jaxfleet.ir import Block, Kind, Operator, Program, Role, Variable, parse
from jaxfleet.ir.embed import Embedded, embed
from jaxfleet.ir.names import grad_name, snapshot_name
from jaxfleet.passes import _adaptive
from jaxfleet.passes._beside import with_beside
from jaxfleet.passes._when_due import branch, due_every, number, op, unchanged
from jaxfleet.pipeline import Pass, made_by, register_pass

_PARTS = ("OWN", "OLD", "WAY", "MEAN", "MET")
_NAME = "meet"
_COUNT = f"{_NAME}.steps"  # how many steps the devices have gone since they met


@register_pass("meet")
@dataclass(frozen=True)
class Meet(Pass):
    """Takes the mean of all devices' parameters after every `every` steps (LocalSGD).

    A parameter's snapshot is what all devices had when they last met. When they meet, the mean of
    how far they went from it is taken off it, and all go on from there; as `local_sgd` does for
    fluid's programs. The snapshot is what the user sees of the parameter. Optimizers keep their
    moments each to itself, and so do statistics of the batch.

    With `outer` the mean way is a gradient, by which another optimizer updates the parameters that
    all had (DiLoCo, Douillard et al. 2023); what it keeps is held beside the state. Plain SGD with
    a rate of 1 is the mean.

    With `loss` devices meet the more often the further it has fallen (AdaComm, Wang and Joshi
    2019): at first they only have to get near, and in the end their differences are what is left.

    With `every` 1 they meet at each step, which with plain SGD is what one device computes with
    the whole batch. Runs after `train_apart`.

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

    every: int = 4  # steps from one meeting to the next
    loss: str = ""  # a number by whose fall the steps become fewer, of which `every` are the most
    outer: str = ""  # the text of a program that updates parameters by `w@GRAD`, the mean way

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
        adaptive = _adaptive.held(self.every) if self.loss else []
        held = with_beside(program, [*begins, *adaptive, *outer.begins])
        at = len(program.blocks)
        names = [*(x.name for pair in pairs for x in pair), *(v.name for v, _ in outer.begins)]
        still = unchanged([(x, held.variables[x]) for x in names], index=at)
        meeting, inner = self._meeting(params, outer, index=at + 1)
        every = _adaptive.EVERY if self.loss else number(self.every, "i32")
        ops, declared, index = due_every(_COUNT, every, _NAME)
        if self.loss:
            self._check_loss(program)
            ops += _adaptive.adapted(self.loss, self.every)
            declared += _adaptive.temporaries()
        new = [made_by(x, self) for x in (*ops, branch(index, names, (at, at + 1)))]
        root = held.root.with_ops([*held.root.ops, *new], declare=declared)
        attrs = held.attrs.updated(shows=tuple((p.name, v.name) for p, v in pairs))
        blocks = (root, *held.blocks[1:], still, meeting, *inner)
        return replace(held, blocks=blocks, attrs=attrs)

    def _meeting(
        self, params: list[Variable], outer: "_Outer", *, index: int
    ) -> tuple[Block, tuple[Block, ...]]:
        """Returns the block that runs when devices meet: own and snapshot in, new ones out."""
        ops: list[Operator] = []
        variables: dict[str, Variable] = {}
        args: list[str] = []
        results: list[str] = []
        for param in params:
            own, old, way, mean, new = (f"{param.name}@{part}" for part in _PARTS)
            used = (own, old, way, mean) if outer.program else (own, old, way, mean, new)
            variables |= {name: Variable(name, param.dtype, param.shape) for name in used}
            ops.append(op("jax.sub", (old, own), (way,)))
            ops.append(op("c_allreduce_avg", (way,), (mean,), ring_id=0))
            args += [own, old]
            results += [old, old] if outer.program else [new, new]
            if outer.program is None:
                ops.append(op("jax.sub", (old, mean), (new,)))
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
            what = f"{self.name}: '{self.loss}' is no number in float32 that block 0 computes"
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
    """What an outer optimizer does with the mean way.

    Attributes:
        program: it; None: the mean way is taken off, and no more.
        begins: what it keeps, and what that begins with.
    """

    program: Program | None
    begins: tuple[tuple[Variable, str | int | float], ...]

    def embedded(self, params: list[Variable], *, index: int) -> Embedded:
        """Returns it as part of the block in which devices meet."""
        assert self.program is not None
        names = {v.name: f"{v.name}@OLD" for v in (*params, *(v for v, _ in self.begins))}
        names |= {grad_name(p.name): f"{p.name}@MEAN" for p in params}
        temporaries = [name for block in self.program.blocks for name in block.variables]
        names |= {name: f"outer/{name}" for name in temporaries}
        return embed(
            self.program, index=index, inner_from=index + 1, parent=0, names=names, sizes={}
        )
