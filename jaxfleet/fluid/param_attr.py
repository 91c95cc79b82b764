"""ParamAttr: attributes of a parameter that a layer creates."""

import numbers
from dataclasses import dataclass
from typing import Any

from jaxfleet.errors import WrongTypeError
from jaxfleet.fluid.argument_checks import check_type, mistake
from jaxfleet.fluid.initializer import Initializer
from jaxfleet.fluid.regularizer import WeightDecayRegularizer


@dataclass
class ParamAttr:
    """Attributes of a parameter.

    Raises:
        WrongTypeError: an attribute is of another type.

    Examples:
        >>> from jaxfleet import fluid
        >>> with fluid.program_guard(fluid.Program(), fluid.Program()):
        ...     attr = fluid.ParamAttr(name="w", initializer=fluid.initializer.Constant(0.5))
        ...     y = fluid.layers.fc(fluid.data("x", [None, 4]), 2, param_attr=attr)
        ...     names = [p.name for p in fluid.default_main_program().all_parameters()]
        >>> names[0]
        'w'
    """

    name: str | None = None  # the parameter's; generated unless given
    # how it is initialized; the layer's default unless given
    initializer: Initializer | None = None
    learning_rate: float = 1.0  # a factor of the optimizer's
    regularizer: Any = None  # used instead of the optimizer's
    trainable: bool = True  # whether it is updated
    do_model_average: bool = True  # whether ModelAverage includes it

    def __post_init__(self) -> None:
        nothing = type(None)
        check_type(self.name, "a parameter's name", (str, nothing))
        check_type(self.initializer, "a parameter's initializer", (Initializer, nothing))
        check_type(self.learning_rate, "a parameter's learning_rate", numbers.Real)
        check_type(self.regularizer, "a parameter's regularizer", (WeightDecayRegularizer, nothing))

    @classmethod
    def of(cls, given: Any) -> "ParamAttr | None":
        """Converts a layer's argument; returns None for False, which means no parameter.

        It is a ParamAttr, or only a name, an initializer or a regularizer; None and True select the
        defaults. TypeError for any other.
        """
        if isinstance(given, ParamAttr):
            return given
        if given is None or given is True:
            return cls()
        if given is False:
            return None
        if isinstance(given, str):
            return cls(name=given)
        if isinstance(given, Initializer):
            return cls(initializer=given)
        if isinstance(given, WeightDecayRegularizer):
            return cls(regularizer=given)
        what = f"a parameter is described by a ParamAttr, not by {type(given).__name__}"
        raise mistake(what, "ParamAttr, a name, an initializer, or False for none", WrongTypeError)
