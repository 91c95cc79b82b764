"""Parts of the update that move to trainers: clipping, and updates that servers cannot run."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from jaxfleet.analysis.optimizer_groups.optimize_section import OPTIMIZE_ROLES
from jaxfleet.analysis.updates import is_fluid_dialect
from jaxfleet.ir import Kind, Operands, Operator, Program, Role, Variable
from jaxfleet.ir.inline import renamed
from jaxfleet.ir.naming import CLIP_MARK, next_name, unique
from jaxfleet.passes.pserver.trainer_split import update_obstacle
from jaxfleet.pipeline import Pass, made_by, register_pass

_OF_ONE_GRADIENT = frozenset({"clip", "clip_by_norm"})


@register_pass("clip_on_trainers")
@dataclass(frozen=True)
class ClipOnTrainers(Pass):
    """Moves clipping out of the optimize section, so that trainers run it.

    A server has only some rows of a gradient: clipping there would differ from clipping on one
    device, or need values that are not sent. Trainers clip their own gradients, which servers then
    merge. Clipping of all gradients by their common norm through `grad_clip=` stays where fluid 1.8
    left it.

    Before::

        program p {dialect="fluid"}
          param w: f32[4]
          block 0
            backward
              w@GRAD: f32[4] = assign(w) for (w, w@GRAD)
            optimize
              Out=[clip_0: f32[4]] = clip(X=w@GRAD) {max=1.0:f32, min=-1.0:f32} for (w, clip_0)
              ParamOut=w = sgd(Grad=clip_0, Param=w) for (w, clip_0)

    After::

        program p {dialect="fluid"}
          param w: f32[4]
          block 0
            backward
              w@GRAD: f32[4] = assign(w) for (w, w@GRAD)
              Out=[clip_0: f32[4]] = clip(X=w@GRAD) {max=1.0:f32, min=-1.0:f32} for (w, clip_0)
            optimize
              ParamOut=w = sgd(Grad=clip_0, Param=w) for (w, clip_0)
    """

    def run(self, program: Program) -> Program:
        if not is_fluid_dialect(program):
            return program
        return program.with_block(
            program.root.with_ops(
                replace(op, role=Role.BACKWARD) if _clips(op) else op for op in program.root.ops
            )
        )


def _clips(op: Operator) -> bool:
    if op.role is not Role.OPTIMIZE:
        return False
    scope = op.attrs.get("op_namescope", "")
    return op.type in _OF_ONE_GRADIENT or (isinstance(scope, str) and CLIP_MARK in scope)


@register_pass("update_on_trainers")
@dataclass(frozen=True)
class UpdateOnTrainers(Pass):
    """Moves the optimizer to the trainers if servers cannot run it.

    A server has the parameters that it holds, their gradients and their state, and exchanges sums
    with the others once per step. Some updates need more: the batch (SAM, a line search),
    parameters already updated in the same step, or two successive sums. Then every trainer runs the
    whole update, from gradients that servers sum, with its own optimizer state; trainer 0 sends the
    new parameters, and servers hold them. That is exact, but costs trainers the time and the memory
    of the optimizer, so it is the last resort. A step whose update servers can run is unchanged.

    Before::

        program p
          data  x: f32[b,3]
          param w: f32[3]
          block 0
            backward
              w@GRAD: f32[3] = jax.reduce_sum(x) {axes=[0]}
              w@GRAD = c_allreduce_sum(w@GRAD) for (w, w@GRAD)
            optimize
              far: f32[b,3] = jax.add(x, w@GRAD)
              again: f32[3] = jax.reduce_sum(far) {axes=[0]}
              again = c_allreduce_sum(again)
              w = jax.sub(w, again)

    After::

        program p
          data  x: f32[b,3]
          param w: f32[3]
          block 0
            backward
              w.own: f32[3] = assign(w)
              w@GRAD: f32[3] = jax.reduce_sum(x) {axes=[0]}
              w@GRAD = c_allreduce_sum(w@GRAD)
              far: f32[b,3] = jax.add(x, w@GRAD)
              again: f32[3] = jax.reduce_sum(far) {axes=[0]}
              again = c_allreduce_sum(again)
              w.own = jax.sub(w.own, again)
              w@NEXT: f32[3] = assign(w.own) for (w, w@NEXT)
            optimize
              w = assign(w@NEXT)
    """

    runs_after = ("grad_allreduce",)

    def run(self, program: Program) -> Program:
        params = program.of_kind(Kind.PARAM)
        if is_fluid_dialect(program) or not params or update_obstacle(program) is None:
            return program
        taken = {*program.variables, *(name for b in program.blocks for name in b.variables)}
        own = {param.name: unique(f"{param.name}.own", taken) for param in params}
        moved = renamed(program, own)
        variables = dict(zip(program.variables, moved.variables.values(), strict=True))
        variables |= {param.name: param for param in params}
        declared = [_temporary(param, own[param.name]) for param in params]
        declared += [_temporary(param, next_name(param.name)) for param in params]
        ops = [
            *(made_by(_assign(name, copy), self) for name, copy in own.items()),
            *(_of_trainers(op) for op in moved.root.ops if op.type != "fetch"),
            *(made_by(op, self) for op in _handed_over(own)),
            *(op for op in moved.root.ops if op.type == "fetch"),
        ]
        blocks = (moved.root.with_ops(ops, declare=declared), *moved.blocks[1:])
        return replace(program, variables=variables, blocks=blocks)


def _handed_over(own: dict[str, str]) -> Iterator[Operator]:
    """Yields operators that send new parameters like gradients, and those of the servers."""
    for name, copy in own.items():
        sent = _assign(copy, next_name(name))
        yield replace(sent, role_var=((name, next_name(name)),))
    for name in own:
        yield _assign(next_name(name), name, Role.OPTIMIZE)


def _assign(source: str, target: str, role: Role = Role.BACKWARD) -> Operator:
    return Operator("assign", Operands.of(source), Operands.of(target), role=role)


def _of_trainers(op: Operator) -> Operator:
    role = Role.BACKWARD if op.role in OPTIMIZE_ROLES else op.role
    return replace(op, role=role, role_var=())


def _temporary(like: Variable, name: str) -> Variable:
    return replace(like, name=name, kind=Kind.TEMP)
