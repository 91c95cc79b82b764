"""Leave an update that servers cannot make to trainers, and give servers what it made."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from jaxfleet.analysis.groups.section import OPTIMIZE_ROLES
from jaxfleet.analysis.updates import says_by_roles
from jaxfleet.ir import Kind, Operands, Operator, Program, Role, Variable
from jaxfleet.ir.embed import renamed
from jaxfleet.ir.names import next_name, unique
from jaxfleet.passes._update_obstacle import update_obstacle
from jaxfleet.pipeline import Pass, made_by, register_pass


@register_pass("update_on_trainers")
@dataclass(frozen=True)
class UpdateOnTrainers(Pass):
    """Moves the optimizer to the trainers, where servers cannot run it.

    A server has the parameters that it holds, their gradients and their state, and exchanges sums
    with the others once a step. Some updates need more: the batch (SAM, a line search), the
    parameters as an update in the same step left them, two sums one after the other. Then every
    trainer makes the whole update, of gradients that servers sum, with an optimizer state of its
    own; trainer 0 sends the new parameters, and servers hold them. That is exact, and costs
    trainers the time and the memory of the optimizer; so it is done only where there is no other
    way. A step whose update servers can make is left as it is.

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
        if says_by_roles(program) or not params or update_obstacle(program) is None:
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
    """Yields what makes new parameters travel as gradients do, and what servers do with them."""
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
