"""Have a trainer's sends carry fewer bytes."""

from dataclasses import dataclass, replace

from jaxfleet.errors import PassError
from jaxfleet.ir import Attrs, Operator, Program
from jaxfleet.pipeline import Pass, made_by, register_pass

_METHODS = ("fp16", "int8", "topk")


@register_pass("compress_sends")
@dataclass(frozen=True)
class CompressSends(Pass):
    """Marks each `send` of gradients with how the host makes them smaller on their way.

    What a message loses is added to the next gradient (error feedback). Of each send, gradients of
    float32 with at least `min_elements` are compressed; servers give them back before they add
    them, and their programs stay the same. Where several gradients are merged into a message, it
    is the merged one. `jaxfleet.ps.compression` says what each method sends. A job that compresses
    is near to the one-device run, and not equal to it.

    Before::

        program p {role="trainer"}
          data  w@GRAD: f32[4096]
          block 0
            rpc
              send(X=w@GRAD) {epmap=["s:1"]}

    After::

        program p {role="trainer"}
          data  w@GRAD: f32[4096]
          block 0
            rpc
              send(X=w@GRAD) {compress="int8", epmap=["s:1"], min_elements=1024}
    """

    method: str = "int8"
    ratio: float = 0.01  # topk: the share of elements that travel
    min_elements: int = 1024  # smaller ones cost a message's head anyhow

    runs_after = ("insert_send_recv", "merge_sends")

    def __post_init__(self) -> None:
        if self.method not in _METHODS:
            what = f"compress_sends: method is '{self.method}'"
            raise PassError(what, hint=f"choose one of {', '.join(_METHODS)}")
        if not 0 < self.ratio <= 1:
            raise PassError(f"compress_sends: ratio is {self.ratio}, not within (0, 1]")

    def run(self, program: Program) -> Program:
        if program.attrs.get("communication") == "fl":
            # What a message loses of a value is not made good by adding it to the next value.
            what = f"compress_sends: '{program.name}' sends parameters, and no gradients"
            raise PassError(what, hint="leave it out; communication='geo' sends changes")
        ops = [self._marked(op) for op in program.root.ops]
        return program.with_block(program.root.with_ops(ops))

    def _marked(self, op: Operator) -> Operator:
        if op.type != "send" or "table" in op.attrs:
            return op
        more: dict[str, str | int | float] = {
            "compress": self.method,
            "min_elements": self.min_elements,
        }
        if self.method == "topk":
            more["ratio"] = self.ratio
        return made_by(replace(op, attrs=Attrs({**op.attrs, **more})), self)
