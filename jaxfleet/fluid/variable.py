"""Variable and Parameter: what an operator of a fluid program reads and writes, by name."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxfleet.errors import ProgramError
from jaxfleet.fluid.dtypes import VarType, dtype_name
from jaxfleet.ir import Size
from jaxfleet.ir.dims import letter

if TYPE_CHECKING:
    from jaxfleet.fluid.block import Block


class Variable:
    """A named value of a block.

    Attributes:
        block: where it is declared.
        name: it.
        sizes: a size for each axis, where the batch is a letter; None while it is unknown.
        dtype: its name: `"float32"`.
        persistable: it outlives a run.
        stop_gradient: gradients end here.
        is_data: it is fed.
    """

    def __init__(
        self,
        block: "Block",
        *,
        name: str,
        type: str = VarType.LOD_TENSOR,
        shape: Sequence[int | None] | None = None,
        dtype: Any = "float32",
        lod_level: int = 0,
        persistable: bool = False,
        error_clip: Any = None,
        stop_gradient: bool = False,
        is_data: bool = False,
        need_check_feed: bool = False,
    ) -> None:
        self.block, self.name, self.type = block, name, type
        self.sizes = None if shape is None else sizes_of(shape)
        self.dtype = dtype_name(dtype)
        self.lod_level, self.persistable, self.error_clip = lod_level, persistable, error_clip
        self.stop_gradient, self.is_data = stop_gradient, is_data
        self.need_check_feed = need_check_feed

    @property
    def shape(self) -> tuple[int, ...]:
        """A number for each axis, -1 for one that is known when the program runs.

        Raises:
            ProgramError: no operator has said yet what it is.
        """
        if self.sizes is None:
            raise ProgramError(f"the shape of '{self.name}' is not known")
        return tuple(size if isinstance(size, int) else -1 for size in self.sizes)

    def to_string(self, throw_on_error: bool = False, with_details: bool = False) -> str:
        """Returns one line of text."""
        del throw_on_error, with_details
        return str(self)

    def __str__(self) -> str:
        shape = "?" if self.sizes is None else ",".join(map(str, self.shape))
        kept = "persistable " if self.persistable else ""
        return f"{kept}{type(self).__name__.lower()} {self.name}: {self.dtype}[{shape}]"

    __repr__ = __str__


class Parameter(Variable):
    """A variable that is trained.

    Attributes:
        trainable: whether `minimize` updates it.
        optimize_attr: its own factor of the learning rate, as `learning_rate`.
        regularizer: its own regularization, in the place of the optimizer's.
    """

    def __init__(
        self,
        block: "Block",
        *,
        shape: Sequence[int],
        dtype: Any,
        trainable: bool = True,
        optimize_attr: dict[str, float] | None = None,
        regularizer: Any = None,
        gradient_clip_attr: Any = None,
        do_model_average: bool | None = None,
        is_distributed: bool = False,
        **kwargs: Any,
    ) -> None:
        if not shape or any(size is None or size < 0 for size in shape):
            what = f"a parameter's shape is all numbers and at least one, not {list(shape)}"
            raise ProgramError(what)
        kwargs["persistable"] = True
        super().__init__(block, shape=shape, dtype=dtype, **kwargs)
        self.trainable = trainable
        self.optimize_attr = optimize_attr or {"learning_rate": 1.0}
        self.regularizer, self.gradient_clip_attr = regularizer, gradient_clip_attr
        self.do_model_average, self.is_distributed = do_model_average, is_distributed


def sizes_of(shape: Sequence[int | None]) -> tuple[Size, ...]:
    """Returns a shape with letters: `b` for an unknown first axis, `n1` for the next, ..."""
    return tuple(
        int(size) if size is not None and size >= 0 else letter("b" if axis == 0 else f"n{axis}")
        for axis, size in enumerate(shape)
    )
