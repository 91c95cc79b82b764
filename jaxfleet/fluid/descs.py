"""Variables and operators through the methods of fluid's `desc`: `var.desc.type()`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxfleet.fluid.dtypes import dtype_name

if TYPE_CHECKING:
    from jaxfleet.fluid.operator import Operator
    from jaxfleet.fluid.variable import Variable


@dataclass(frozen=True)
class VariableDesc:
    """What is said of a variable; what is set is set in it.

    Attributes:
        variable: it.
    """

    variable: "Variable"

    def name(self) -> str:
        """Returns its name."""
        return self.variable.name

    def type(self) -> str:
        """Returns its kind, one of `VarType`'s."""
        return self.variable.type

    def dtype(self) -> str:
        """Returns its dtype, one of `VarType`'s."""
        return self.variable.dtype

    def shape(self) -> list[int]:
        """Returns a number for each axis, -1 for one that is known when the program runs."""
        return list(self.variable.shape)

    def lod_level(self) -> int:
        """Returns how many levels of ragged rows there are."""
        return self.variable.lod_level

    def persistable(self) -> bool:
        """Whether it outlives a run."""
        return self.variable.persistable

    def need_check_feed(self) -> bool:
        """Whether what is fed must have its shape and dtype."""
        return self.variable.need_check_feed

    def set_type(self, type: str) -> None:
        """Sets its kind."""
        self.variable.type = type
        self.variable.block.program.version += 1

    def set_dtype(self, dtype: Any) -> None:
        """Sets its dtype."""
        self.variable.dtype = dtype_name(dtype)
        self.variable.block.program.version += 1

    def set_shape(self, shape: Sequence[int | None]) -> None:
        """Sets its shape."""
        self.variable._set_shape(shape)

    def set_persistable(self, persistable: bool) -> None:
        """Sets whether it outlives a run."""
        self.variable.persistable = persistable


@dataclass(frozen=True)
class OperatorDesc:
    """What is said of an operator; what is set is set in it.

    Attributes:
        operator: it.
    """

    operator: "Operator"

    def type(self) -> str:
        """Returns what it does."""
        return self.operator.type

    def input(self, name: str) -> list[str]:
        """Returns the names in an input slot."""
        return self.operator.input(name)

    def output(self, name: str) -> list[str]:
        """Returns the names in an output slot."""
        return self.operator.output(name)

    def input_names(self) -> list[str]:
        """Returns the input slots."""
        return self.operator.input_names

    def output_names(self) -> list[str]:
        """Returns the output slots."""
        return self.operator.output_names

    def input_arg_names(self) -> list[str]:
        """Returns the names of what it reads."""
        return self.operator.input_arg_names

    def output_arg_names(self) -> list[str]:
        """Returns the names of what it writes."""
        return self.operator.output_arg_names

    def attr(self, name: str) -> Any:
        """Returns an attribute."""
        return self.operator.attr(name)

    def attr_names(self) -> list[str]:
        """Returns the names of its attributes."""
        return self.operator.attr_names

    def has_attr(self, name: str) -> bool:
        """Whether there is an attribute."""
        return self.operator.has_attr(name)

    def set_attr(self, name: str, value: Any) -> None:
        """Sets an attribute."""
        self.operator._set_attr(name, value)
