"""How many bytes a variable takes, once every letter of its shape has a number."""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import prod

from jaxfleet.errors import PassError
from jaxfleet.ir import Block, Kind, Program, Variable, evaluate

_KEY_BYTES = {"fry": 8, "rbg": 16, "unsafe_rbg": 16}  # of a random key, by how it is drawn from


def bytes_of(variable: Variable, sizes: Mapping[str, int]) -> int:
    """Returns how many bytes a variable takes.

    Args:
        variable: any; what no device holds (handles, what orders operators) takes none.
        sizes: a number for every letter of its shape.

    Raises:
        PassError: a letter has no number.
    """
    try:
        shape = [evaluate(size, sizes) for size in variable.shape]
    except KeyError as error:
        what = f"'{variable.name}' is {variable.type}, and a size has no number: {error.args[0]}"
        raise PassError(what, hint="give a number for every letter") from None
    return prod(shape) * itemsize(variable.dtype)


@lru_cache(maxsize=1 << 8)
def itemsize(dtype: str) -> int:
    """Returns the bytes of one element; of a number of less than a byte, a byte."""
    if dtype.startswith("key<"):
        return _KEY_BYTES.get(dtype.removeprefix("key<").rstrip(">"), _KEY_BYTES["fry"])
    if dtype == "raw":
        return 0
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits.group()) // 8) if bits is not None else 1


class Counted:
    """The bytes of what a step makes for itself.

    Data, parameters, state, constants and what the step returns are there whatever a plan does,
    and count for nothing, as docs/memory.md has it. Nor does what lies in the host's memory.
    """

    def __init__(
        self, program: Program, sizes: Mapping[str, int], *, keep: Iterable[str] = ()
    ) -> None:
        """Prepares to count.

        Args:
            program: any.
            sizes: a number for every letter.
            keep: variables that are fetched by name, so returned.
        """
        self._program = program
        self._sizes = sizes
        self._elsewhere = set(keep)
        for op in program.root.ops:
            if op.type == "fetch":
                self._elsewhere.update(op.reads)
            elif op.type == "to_host":
                self._elsewhere.update(op.writes)
        self._by_type: dict[str, int] = {}

    def of(self, name: str, block: Block | None = None) -> int:
        """Returns the bytes of a variable that a block sees, block 0 unless told."""
        variable = self._program.lookup(name, block)
        if variable.kind is not Kind.TEMP or name in self._elsewhere:
            return 0
        key = variable.type
        if key not in self._by_type:
            self._by_type[key] = bytes_of(variable, self._sizes)
        return self._by_type[key]
