"""Clip gradients where all of them is at hand: on trainers, before they are sent."""

from dataclasses import dataclass, replace

from jaxfleet.analysis.updates import says_by_roles
from jaxfleet.ir import Operator, Program, Role
from jaxfleet.ir.names import CLIP_MARK
from jaxfleet.pipeline import Pass, register_pass

_OF_ONE_GRADIENT = frozenset({"clip", "clip_by_norm"})


@register_pass("clip_on_trainers")
@dataclass(frozen=True)
class ClipOnTrainers(Pass):
    """Takes operators that clip out of the optimize section, so that trainers do them.

    A server has some rows of a gradient, and others than the gradient's norm are none of its
    business: clipped there, a gradient would be cut otherwise than on one device, or read what
    no one sends. Trainers clip their own gradients, which servers then merge. What clips all
    gradients by their common norm through `grad_clip=` stays where fluid 1.8 left it.

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
        if not says_by_roles(program):
            return program
        ops = [_on_trainers(op) if _clips(op) else op for op in program.root.ops]
        return program.with_block(program.root.with_ops(ops))


def _clips(op: Operator) -> bool:
    if op.role is not Role.OPTIMIZE:
        return False
    scope = op.attrs.get("op_namescope", "")
    return op.type in _OF_ONE_GRADIENT or (isinstance(scope, str) and CLIP_MARK in scope)


def _on_trainers(op: Operator) -> Operator:
    return replace(op, role=Role.BACKWARD)
