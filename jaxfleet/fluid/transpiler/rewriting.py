"""Rewrites of fluid programs by passes of the IR, including mixed precision."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxfleet.errors import PassError
from jaxfleet.fluid import unique_name
from jaxfleet.fluid.argument_checks import mistake, number
from jaxfleet.fluid.framework.from_ir import write_back
from jaxfleet.fluid.framework.operator import Operator
from jaxfleet.fluid.framework.program import Program, program_guard
from jaxfleet.fluid.framework.to_ir import ir_program
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.ir import Program as IrProgram
from jaxfleet.ops.user_frames import line_of_caller
from jaxfleet.passes import AmpByRole
from jaxfleet.pipeline import Pass
from jaxfleet.runtime.transpile import transpile


@dataclass(frozen=True)
class Rewritten:
    """The result of passes on a program, before it is written back."""

    program: Program
    made: IrProgram

    @classmethod
    def of(cls, program: Program, passes: Sequence[Pass], *, name: str = "main") -> "Rewritten":
        """Runs passes on a program, dumping each result if the environment requests it.

        PassError if a pass cannot run; a note gives the source line that requested it.
        """
        try:
            return cls(program, transpile(ir_program(program, name=name), passes, dump_dir=None)[0])
        except PassError as error:
            line = line_of_caller()
            if line is not None:
                error.add_note(f"  {line.where()}")
            raise

    def write_back(self) -> None:
        """Replaces the program by the result; a copy of the original is its `_origin_program`."""
        origin = self.program.clone()
        write_back(self.program, self.made)
        self.program._origin_program = origin


@dataclass(frozen=True)
class MixedPrecisionState:
    """Names of the state of mixed precision.

    Attributes:
        scale: the loss scale.
        good: the number of consecutive finite steps.
        bad: the number of nonfinite steps.
    """

    scale: str
    good: str
    bad: str

    @classmethod
    def begun(
        cls, main: Program, startup: Program, init_loss_scaling: float
    ) -> "MixedPrecisionState":
        """Declares and initializes the state; ValueError if the scale is not positive."""
        if not number(init_loss_scaling, "amp_loss_scaling") > 0:
            what = f"amp_loss_scaling is {init_loss_scaling}"
            raise mistake(what, "it is more than 0; a power of two rounds nothing")
        with program_guard(main, startup):
            scale = _declared("loss_scaling", "float32", init_loss_scaling)
            good, bad = (_declared(f"num_{word}_steps", "int32", 0) for word in ("good", "bad"))
        return cls(scale, good, bad)


def use_mixed_precision(
    main: Program, startup: Program, init_loss_scaling: float = 2.0**15
) -> Operator:
    """Rewrites products to float16 and scales the loss, in place.

    Equivalent to fluid's `decorate` with a dynamic scale: see `AmpByRole`.

    Returns the operator that updates the scale. `main` is the program after `minimize`; ValueError
    if it has no gradients.
    """
    rewrite_by_role(main, MixedPrecisionState.begun(main, startup, init_loss_scaling))
    return next(op for op in main.global_block().ops if op.type == "update_loss_scaling")


def rewrite_by_role(main: Program, state: MixedPrecisionState, **options: Any) -> None:
    """Rewrites a program with gradients, in place, with options of `AmpByRole`."""
    rewrite = AmpByRole(state.scale, state.good, state.bad, **options)
    write_back(main, Rewritten.of(main, [rewrite]).made)


def _declared(key: str, dtype: str, value: float) -> str:
    name = unique_name.generate(key)
    LayerHelper.named(name).global_variable(name, [1], dtype, value)
    return name
