"""Mixed precision of a program that `minimize` has made: half precision, and a scaled loss."""

from jaxfleet.fluid import unique_name
from jaxfleet.fluid.checks import mistake, number
from jaxfleet.fluid.from_ir import write_back
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.operator import Operator
from jaxfleet.fluid.program import Program, program_guard
from jaxfleet.fluid.transpiler.rewriting import Rewritten
from jaxfleet.passes import AmpByRole


def use_mixed_precision(
    main: Program, startup: Program, init_loss_scaling: float = 2.0**15
) -> Operator:
    """Has products computed in float16, and gradients by a scale of the loss; both in place.

    As fluid's `decorate` with a dynamic scale does: see `AmpByRole`.

    Args:
        main: behind `minimize`.
        startup: where the scale begins.
        init_loss_scaling: with what.

    Returns:
        The operator that changes the scale.

    Raises:
        ValueError: the scale is not more than 0, or the program has no gradients.
    """
    if not number(init_loss_scaling, "amp_loss_scaling") > 0:
        what = f"amp_loss_scaling is {init_loss_scaling}"
        raise mistake(what, "it is more than 0; a power of two rounds nothing")
    with program_guard(main, startup):
        rewrite = AmpByRole(
            scale=_state("loss_scaling", "float32", init_loss_scaling),
            good=_state("num_good_steps", "int32", 0),
            bad=_state("num_bad_steps", "int32", 0),
        )
    write_back(main, Rewritten.of(main, [rewrite]).made)
    return next(op for op in main.global_block().ops if op.type == "update_loss_scaling")


def _state(key: str, dtype: str, value: float) -> str:
    name = unique_name.generate(key)
    LayerHelper.named(name).global_variable(name, [1], dtype, value)
    return name
