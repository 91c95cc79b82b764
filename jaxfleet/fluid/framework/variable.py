"""Variable and Parameter: the operands of operators, by name."""

import copy
import re
from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING, Any, TypeAlias

from jaxfleet.errors import WrongTypeError
from jaxfleet.fluid.argument_checks import check_type, mistake
from jaxfleet.fluid.framework.operator_overloads import Arithmetic
from jaxfleet.fluid.framework.types import VariableDesc, VarType, dtype_name
from jaxfleet.ir import Size, grad_name
from jaxfleet.ir.dims import letter

if TYPE_CHECKING:
    from jaxfleet.fluid.framework.block import Block
    from jaxfleet.fluid.framework.operator import Operator


class Variable(Arithmetic):
    """A named value of a block.

    Args:
        block: the block that declares it.
        type: its kind, a member of `VarType`.
        name: an unused name by default.
        shape: the size of each axis, None or -1 where it is known only at run time.
        dtype: of its elements; `float32` by default.
        lod_level: the number of levels of ragged rows.
        capacity: of a reader's queue; ignored.
        persistable: it outlives a run.
        error_clip: how its gradient is clipped as soon as it is computed.
        stop_gradient: gradients end here.
        is_data: it is fed.
        need_check_feed: fed values must match this shape and dtype.

    Attributes:
        sizes: the size of each axis, where the batch is a letter; None while unknown.
    """

    def __init__(
        self,
        block: "Block",
        type: str = VarType.LOD_TENSOR,
        name: str | None = None,
        shape: Sequence[int | None] | None = None,
        dtype: Any = None,
        lod_level: int | None = None,
        capacity: int | None = None,
        persistable: bool | None = None,
        error_clip: Any = None,
        stop_gradient: bool = False,
        is_data: bool = False,
        need_check_feed: bool = False,
    ) -> None:
        del capacity
        if name is not None:
            check_type(name, "a variable's name", str)
        self.block, self.type = block, type
        self.name = block.program.unique_name("_generated_var") if name is None else name
        self.sizes = None if shape is None else sizes_of(shape)
        self.dtype = dtype_name("float32" if dtype is None else dtype)
        self.lod_level, self._persistable = lod_level or 0, bool(persistable)
        self.error_clip, self.stop_gradient = error_clip, stop_gradient
        self.is_data, self.need_check_feed = is_data, need_check_feed
        if is_data and lod_level and self.sizes and self.sizes[0] == letter("b"):
            self.sizes = (_rows_of(self.name), *self.sizes[1:])

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each axis, -1 where it is known only at run time.

        Raises:
            ProgramError: no operator has determined it yet.
        """
        if self.sizes is None:
            raise mistake(f"the shape of '{self.name}' is not known")
        return tuple(size if isinstance(size, int) else -1 for size in self.sizes)

    @property
    def desc(self) -> VariableDesc:
        """A view with fluid's description methods: `var.desc.type()`."""
        return VariableDesc(self)

    @property
    def persistable(self) -> bool:
        """Whether the variable outlives a run."""
        return self._persistable

    @persistable.setter
    def persistable(self, persistable: bool) -> None:
        self._persistable = bool(persistable)
        self.block.program.version += 1

    @property
    def op(self) -> "Operator | None":
        """The last operator of its block that writes it; None if there is none."""
        writers = (op for op in reversed(self.block.ops) if self.name in op.output_arg_names)
        return next(writers, None)

    @property
    def grad_name(self) -> str:
        return grad_name(self.name)

    def _set_shape(self, shape: Sequence[int | None]) -> None:
        self.sizes = sizes_of(shape)
        self.block.program.version += 1

    def _set_error_clip(self, error_clip: Any) -> None:
        self.error_clip = error_clip

    def to_string(self, throw_on_error: bool = False, with_details: bool = False) -> str:
        """Returns one line of text; arguments and errors as `Block.to_string`."""
        check_type(throw_on_error, "throw_on_error", bool)
        check_type(with_details, "with_details", bool)
        if throw_on_error and self.type != VarType.RAW:  # RAW has no shape
            self.shape  # noqa: B018  # raises
        more = ", ".join(f"{k}={v!r}" for k, v in self._details().items() if v not in (None, False))
        return f"{self} {{{more}}}" if with_details and more else str(self)

    def _details(self) -> dict[str, Any]:
        kind = None if self.type == VarType.LOD_TENSOR else self.type
        clip, lod_level = self.error_clip, self.lod_level or None
        shown = {"type": kind, "lod_level": lod_level, "error_clip": clip, "is_data": self.is_data}
        return {**shown, "stop_gradient": self.stop_gradient}

    def _copied(self, block: "Block") -> "Variable":
        made = copy.copy(self)
        made.block = block
        return made

    def __str__(self) -> str:
        shape = "?" if self.sizes is None else ",".join(map(str, self.shape))
        kept = "persistable " if self.persistable else ""
        return f"{kept}{type(self).__name__.lower()} {self.name}: {self.dtype}[{shape}]"

    __repr__ = __str__


class Parameter(Variable):
    """A variable that is trained.

    Attributes:
        trainable: whether `minimize` updates it.
        optimize_attr: its own learning rate factor, as `learning_rate`.
        regularizer: its own regularization, instead of the optimizer's.
        gradient_clip_attr: its own clipping, set by `set_gradient_clip`.
        do_model_average: whether ModelAverage includes it.
        need_clip: whether its gradient is clipped.
        is_distributed: its rows are held by parameter servers.

    Raises:
        ProgramError: its shape is missing or not fully known.
    """

    def __init__(
        self,
        block: "Block",
        shape: Sequence[int],
        dtype: Any,
        *,
        trainable: bool = True,
        optimize_attr: dict[str, Any] | None = None,
        regularizer: Any = None,
        gradient_clip_attr: Any = None,
        do_model_average: bool | None = None,
        need_clip: bool = True,
        is_distributed: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(block, shape=shape, dtype=dtype, **{**kwargs, "persistable": True})
        if not self.sizes or not all(isinstance(size, int) for size in self.sizes):
            given = None if shape is None else list(shape)
            raise mistake(f"a parameter's shape is all numbers and at least one, not {given}")
        self.trainable = trainable
        self.optimize_attr = dict(optimize_attr or {"learning_rate": 1.0})
        self.regularizer, self.gradient_clip_attr = regularizer, gradient_clip_attr
        self.do_model_average, self.need_clip = do_model_average, need_clip
        self.is_distributed = is_distributed

    def _details(self) -> dict[str, Any]:
        kept = ("trainable", "optimize_attr", "regularizer", "do_model_average", "need_clip")
        return {**super()._details(), **{name: getattr(self, name) for name in kept}}

    def _copied(self, block: "Block") -> "Parameter":
        made = copy.copy(self)
        made.block, made.optimize_attr = block, dict(self.optimize_attr)
        return made


Pairs: TypeAlias = list[tuple[Parameter, Variable]]  # parameters with their gradients


def sizes_of(shape: Sequence[int | None]) -> tuple[Size, ...]:
    """Returns a shape with letters: `b` for an unknown first axis, `n1` for the next, ...

    Raises TypeError if it is not a list of integers.
    """
    try:
        numbers = [-1 if size is None else index(size) for size in shape]
    except TypeError as error:
        hint = "a list of whole numbers, -1 or None for an axis that is known when it runs"
        raise mistake(f"{shape!r} is no shape", hint, WrongTypeError) from error
    return tuple(
        size if size >= 0 else letter("b" if axis == 0 else f"n{axis}")
        for axis, size in enumerate(numbers)
    )


def _rows_of(name: str) -> Size:
    """Returns the letter of the rows of a variable fed as sequences, different from all others."""
    word = re.sub(r"\W", "_", name)
    return letter(f"{word}_rows" if not word[:1].isdigit() else f"_{word}_rows")
