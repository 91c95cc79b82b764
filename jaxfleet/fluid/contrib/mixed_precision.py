"""Mixed precision around a script's optimizer: `fluid.contrib.mixed_precision.decorate`."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxfleet.fluid import unique_name
from jaxfleet.fluid.argument_checks import check_type, mistake, number
from jaxfleet.fluid.framework import default_main_program, default_startup_program
from jaxfleet.fluid.framework.from_ir import Rewritten, write_back
from jaxfleet.fluid.framework.operator import Operator
from jaxfleet.fluid.framework.program import Program, program_guard
from jaxfleet.fluid.framework.variable import Pairs, Variable
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.optimizer.base import Optimizer
from jaxfleet.passes import AmpByRole

_WHITE = frozenset(AmpByRole.products)
_BLACK = frozenset({
    *("exp", "square", "log", "mean", "sum", "cos_sim", "softmax", "softmax_with_cross_entropy"),
    *("sigmoid_cross_entropy_with_logits", "cross_entropy", "cross_entropy2"),
})  # fmt: skip


class AutoMixedPrecisionLists:
    """The types of operators that compute in float16: those of `white_list`.

    All others stay in float32. Fluid has a third list, of operators that compute in the dtype of
    their inputs; here they are in float32 as well, which rounds less.

    Args:
        custom_white_list: types to add.
        custom_black_list: types to remove.
        custom_black_varnames: variables that no operator reads or writes in float16.

    Raises:
        ValueError: a type is in both custom lists.
    """

    def __init__(
        self,
        custom_white_list: Iterable[str] | None = None,
        custom_black_list: Iterable[str] | None = None,
        custom_black_varnames: Iterable[str] | None = None,
    ) -> None:
        white, black = set(custom_white_list or ()), set(custom_black_list or ())
        if white & black:
            what = (
                f"Custom white list overlap custom black list: {', '.join(sorted(white & black))}"
            )
            raise mistake(what, "name each type once")
        self.white_list = (_WHITE | white) - black
        self.black_list = (_BLACK | black) - white
        self.black_varnames = set(custom_black_varnames or ())


@dataclass(frozen=True)
class MixedPrecisionState:
    """Names of the loss scale and of the counts of consecutive finite and nonfinite steps."""

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


class OptimizerWithMixedPrecision(Optimizer):
    """Wraps an optimizer to train in mixed precision; made by `decorate`."""

    def __init__(
        self, optimizer: Optimizer, amp_lists: AutoMixedPrecisionLists, **options: Any
    ) -> None:
        check_type(optimizer, "what mixed precision is put around", Optimizer)
        self._optimizer, self._amp_lists = optimizer, amp_lists
        self._init_loss_scaling = options.pop("init_loss_scaling")
        self._options = options
        self._kept: MixedPrecisionState | None = None
        self._main: Program | None = None
        self._scaled_loss: Variable | None = None

    def get_loss_scaling(self) -> Variable:
        main = self._main or default_main_program()
        return main.global_block().var(self._begun(main, None).scale)

    def get_scaled_loss(self) -> Variable | None:
        return self._scaled_loss

    def backward(
        self,
        loss: Variable,
        startup_program: Program | None = None,
        parameter_list: Any = None,
        no_grad_set: Collection[str | Variable] | None = None,
        callbacks: Sequence[Any] | None = None,
    ) -> Pairs:
        """Adds the gradients in mixed precision, without the loss scale.

        Raises:
            PassError: the program is in mixed precision already.
        """
        check_type(loss, "'loss' of minimize", Variable)
        main = loss.block.program
        state = self._begun(main, startup_program)
        with program_guard(main, startup_program or default_startup_program()):
            self._scaled_loss = loss * main.global_block().var(state.scale)
        given = (loss, startup_program, parameter_list, no_grad_set, callbacks)
        pairs = self._optimizer.backward(*given)
        lists = self._amp_lists
        rewrite_by_role(
            main, state, products=tuple(sorted(lists.white_list)),
            float32_variables=tuple(sorted(lists.black_varnames)), **self._options,
        )  # fmt: skip
        return pairs

    def apply_gradients(self, params_grads: Pairs) -> list[Operator]:
        return self._optimizer.apply_gradients(params_grads)

    def apply_optimize(
        self, loss: Variable, startup_program: Program | None, params_grads: Pairs
    ) -> list[Operator]:
        return self._optimizer.apply_optimize(loss, startup_program, params_grads)

    def _begun(self, main: Program, startup: Program | None) -> MixedPrecisionState:
        """Returns the scale and the step counts, which a program has only once."""
        if self._kept is None or self._main is not main:
            startup = startup or default_startup_program()
            self._kept = MixedPrecisionState.begun(main, startup, self._init_loss_scaling)
            self._main = main
        return self._kept


def decorate(
    optimizer: Optimizer,
    amp_lists: AutoMixedPrecisionLists | None = None,
    init_loss_scaling: float = 2.0**15,
    incr_every_n_steps: int = 1000,
    decr_every_n_nan_or_inf: int = 2,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.8,
    use_dynamic_loss_scaling: bool = True,
) -> OptimizerWithMixedPrecision:
    """Returns an optimizer that trains in mixed precision: see `jaxfleet.passes.AmpByRole`.

    Args:
        optimizer: updates the parameters, which stay in float32.
        amp_lists: the operators that compute in float16.
        init_loss_scaling: the initial scale of the loss.
        incr_every_n_steps: the number of consecutive finite steps before the scale grows.
        decr_every_n_nan_or_inf: the number of nonfinite steps before it shrinks.
        incr_ratio: the factor by which it grows.
        decr_ratio: the factor by which it shrinks, not below 1.
        use_dynamic_loss_scaling: adapt the scale, and skip updates in nonfinite steps; otherwise
            the scale is constant, and such a step updates parameters.

    Raises:
        ValueError: a number is out of range.
        TypeError: an argument is of the wrong type.
    """
    lists = amp_lists if amp_lists is not None else AutoMixedPrecisionLists()
    check_type(lists, "'amp_lists' of decorate", AutoMixedPrecisionLists)
    made = {
        "incr_every_n_steps": incr_every_n_steps,
        "decr_every_n_nan_or_inf": decr_every_n_nan_or_inf,
        "incr_ratio": incr_ratio,
        "decr_ratio": decr_ratio,
    }
    for name, value in made.items():
        if not number(value, f"'{name}' of decorate") > 0:
            raise mistake(f"decorate: '{name}' is {value}", "it is more than 0")
    return OptimizerWithMixedPrecision(
        optimizer, lists, init_loss_scaling=init_loss_scaling,
        is_dynamic=bool(use_dynamic_loss_scaling), **made,
    )  # fmt: skip
