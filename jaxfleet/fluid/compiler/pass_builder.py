"""PassBuilder: the passes that a BuildStrategy has added to how a program is rewritten.

Fluid's builder lists all passes of its compiler. XLA has its own here, and fields of the strategy
say what jaxfleet's do; so a script adds the one pass that has no field.
"""

from typing import Any

from jaxfleet.fluid.checks import mistake

_MERGE, _REPEATS = "multi_batch_merge_pass", "num_repeats"


class BuildPass:
    """One pass, with its attributes.

    Args:
        pass_type: `multi_batch_merge_pass`.

    Raises:
        ProgramError: there is no such pass.
    """

    def __init__(self, pass_type: str) -> None:
        if pass_type != _MERGE:
            hint = f"'{_MERGE}' can be added; fields of the BuildStrategy and XLA do the rest"
            raise mistake(f"there is no pass {pass_type!r} to add to a BuildStrategy", hint)
        self._type = pass_type
        self._attrs: dict[str, Any] = {}

    def type(self) -> str:
        """Returns what it is called."""
        return self._type

    def set(self, name: str, value: Any) -> None:
        """Sets an attribute.

        Raises:
            ProgramError: it has no such one, or not with such a value.
        """
        if name != _REPEATS or not isinstance(value, int) or value < 1:
            what = f"{self._type} has no {name}={value!r}"
            raise mistake(what, f"set('{_REPEATS}', n), a number of at least 1")
        self._attrs[name] = value

    @property
    def num_repeats(self) -> int:
        """How often gradients are computed for an update.

        Raises:
            ProgramError: nothing has said it.
        """
        if _REPEATS not in self._attrs:
            raise mistake(f"{self._type} is not told how often", f"set('{_REPEATS}', n)")
        repeats: int = self._attrs[_REPEATS]
        return repeats


class PassBuilder:
    """The passes, in order."""

    def __init__(self) -> None:
        self._passes: list[BuildPass] = []

    def all_passes(self) -> list[BuildPass]:
        """Returns them."""
        return list(self._passes)

    def append_pass(self, pass_type: str) -> BuildPass:
        """Adds a pass behind the others, and returns it."""
        return self.insert_pass(len(self._passes), pass_type)

    def insert_pass(self, idx: int, pass_type: str) -> BuildPass:
        """Adds a pass before that of a number, and returns it.

        Raises:
            ProgramError: there is no such pass, or fewer passes than that.
        """
        if not 0 <= idx <= len(self._passes):
            raise mistake(f"pass {idx} cannot be inserted among {len(self._passes)}")
        made = BuildPass(pass_type)
        self._passes.insert(idx, made)
        return made

    def remove_pass(self, idx: int) -> None:
        """Takes the pass of a number out.

        Raises:
            ProgramError: there is none.
        """
        if not 0 <= idx < len(self._passes):
            raise mistake(f"there is no pass {idx} among {len(self._passes)}")
        del self._passes[idx]
