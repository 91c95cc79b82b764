"""Program, the default programs, and values cached for each version of a program."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from jaxfleet.fluid import unique_name
from jaxfleet.fluid.argument_checks import check_type, mistake
from jaxfleet.fluid.framework.block import Block
from jaxfleet.fluid.framework.guards import ProgramAttributes, RoleGuards
from jaxfleet.fluid.framework.program_copy import (
    copy_data_info,
    copy_parameter_info,
    copy_program,
    mark_inference,
    prune_to,
    without_backward,
)
from jaxfleet.fluid.framework.variable import Parameter, Variable
from jaxfleet.ir import Attr
from jaxfleet.pipeline import Pass
from jaxfleet.runtime.transpile import begin_series, run_passes


class Program(RoleGuards, ProgramAttributes):
    """A program that is built operator by operator.

    Attributes:
        blocks: block 0 is the global one.
        current_block_idx: the block to which layers add operators.
        version: incremented by every addition, removal or change.
        _facts: properties of the whole program set by a transpiler (`role="trainer"`), which become
            attributes of the IR program.

    Examples:
        >>> from jaxfleet import fluid
        >>> with fluid.program_guard(fluid.Program(), fluid.Program()):
        ...     x = fluid.data("x", [None, 4])
        ...     hidden = fluid.layers.fc(x, 2, act="relu")
        ...     main = fluid.default_main_program()
        >>> [op.type for op in main.global_block().ops]
        ['mul', 'elementwise_add', 'relu']
    """

    _default_seed = 0

    def __init__(self) -> None:
        RoleGuards.__init__(self)
        ProgramAttributes.__init__(self)
        self.version = 0
        self.current_block_idx = 0
        self._seed = Program._default_seed
        self._facts: dict[str, Attr] = {}
        self._readers: list[Any] = []  # loaders from which a run takes batches
        self._fleet_rows: dict[str, Any] = {}  # tables that `fleet_embedding` declared for the job
        self._open_loops: list[int] = []  # numbers of the blocks of loops under construction
        self.blocks = [Block(self, 0)]

    # --- random numbers ----------------------------------------------------------------------

    @property
    def random_seed(self) -> int:
        """The seed of random operators; 0 for a different one in each run."""
        return self._seed

    @random_seed.setter
    def random_seed(self, seed: int) -> None:
        self._seed = _seed(seed)
        self.version += 1

    def global_seed(self, seed: int = 0) -> None:
        """Sets the random seed of this program and of programs created later."""
        Program._default_seed = self.random_seed = _seed(seed)

    # --- contents ----------------------------------------------------------------------------

    def global_block(self) -> Block:
        return self.blocks[0]

    def block(self, index: int) -> Block:
        return self.blocks[index]

    def current_block(self) -> Block:
        """Returns the block to which layers add operators."""
        return self.blocks[self.current_block_idx]

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    def list_vars(self) -> Iterator[Variable]:
        for block in self.blocks:
            yield from block.vars.values()

    def all_parameters(self) -> list[Parameter]:
        """Returns the parameters in order of creation."""
        return [p for block in self.blocks for p in block.all_parameters()]

    def unique_name(self, key: str) -> str:
        """Returns an unused name."""
        return unique_name.generate(key)

    def _create_block(self, parent_idx: int | None = None) -> Block:
        parent = self.current_block_idx if parent_idx is None else parent_idx
        self.blocks.append(Block(self, len(self.blocks), parent))
        self.current_block_idx = len(self.blocks) - 1
        self.version += 1
        return self.current_block()

    def _rollback(self) -> None:
        self.current_block_idx = self.current_block().parent_idx

    # --- copies ------------------------------------------------------------------------------

    def clone(self, for_test: bool = False) -> "Program":
        """Returns a copy.

        With `for_test` it drops backward and optimize operators and sets `is_test` on the rest;
        call it before `minimize`.
        """
        if not for_test:
            return copy_program(self)
        return mark_inference(without_backward(copy_program(self)), prune_read_op=False)

    def _prune(self, targets: Any) -> "Program":
        """Returns a copy pruned to its targets; see `_prune_with_input`."""
        return self._prune_with_input([], targets)

    def _prune_with_input(self, feeded_var_names: Any, targets: Any) -> "Program":
        """Returns a copy with only the operators that its targets need.

        An operator that updates a parameter is kept only if it is itself a target.

        Args:
            feeded_var_names: names of fed variables, whose producers are not needed.
            targets: a Variable, an Operator or the name of a variable, or a list of them.

        Raises:
            ValueError: a target is of another kind, or no operator produces it.
        """
        return prune_to(self, _listed(feeded_var_names), _listed(targets))

    def _inference_optimize(self, prune_read_op: bool = True) -> "Program":
        """Returns a copy in test mode, without readers if `prune_read_op` is set."""
        return mark_inference(copy_program(self), prune_read_op=prune_read_op)

    def _copy_param_info_from(self, other: "Program") -> None:
        """Turns variables into parameters where `other` has parameters of the same names."""
        copy_parameter_info(_program(other), self)

    def _copy_data_info_from(
        self, other: "Program", pruned_origin_block_id_map: dict[int, int] | None = None
    ) -> None:
        """Turns variables into data where `other` has data of the same names.

        `pruned_origin_block_id_map` has the block of `other` for each block of this program.
        """
        copy_data_info(_program(other), self, pruned_origin_block_id_map or {})

    def _copy_dist_param_info_from(self, other: "Program") -> None:
        """Copies the placement of parameters that a transpiler recorded in another program."""
        self._take_over(_program(other))

    def _rewrite_for_memory(self, by: Pass) -> None:
        """Runs a pass on the program in place and records that its memory has been optimized."""
        from jaxfleet.fluid.framework.from_ir import write_back  # noqa: PLC0415  # it is built on this
        from jaxfleet.fluid.framework.to_ir import ir_program  # noqa: PLC0415  # as that

        write_back(self, run_passes(ir_program(self), [by], series=begin_series()))
        self._is_mem_optimized = True
        self._prints_memory = self._prints_memory or bool(getattr(by, "print_log", False))

    # --- text --------------------------------------------------------------------------------

    def to_string(self, throw_on_error: bool, with_details: bool = False) -> str:
        """Returns the program as text; arguments and errors as `Block.to_string`."""
        check_type(throw_on_error, "throw_on_error", bool)
        return "\n".join(block.to_string(throw_on_error, with_details) for block in self.blocks)

    def __str__(self) -> str:
        return self.to_string(throw_on_error=False)

    @property
    def desc(self) -> "Program":
        """The program itself: scripts write `program.desc.serialize_to_string()`."""
        return self

    def serialize_to_string(self) -> bytes:
        """Returns the program as bytes, including all attributes of its parameters.

        Raises ProgramError if a parameter's regularization or clipping is of a custom class.
        """
        from jaxfleet.fluid.framework.serialization import serialize  # noqa: PLC0415  # it is built on this

        return serialize(self)

    @staticmethod
    def parse_from_string(binary_str: bytes) -> "Program":
        """Restores a serialized program.

        Raises:
            TypeError: the argument is not bytes.
            ProgramError: the data is damaged, of a newer version, or not a program.
        """
        from jaxfleet.fluid.framework.serialization import deserialize  # noqa: PLC0415  # as serialize

        check_type(binary_str, "binary_str", bytes)
        return deserialize(binary_str)[0]


class _Defaults:
    def __init__(self) -> None:
        self.main, self.startup = Program(), Program()


_DEFAULTS = _Defaults()


def default_main_program() -> Program:
    """Returns the program to which layers are added.

    Examples:
        >>> from jaxfleet import fluid
        >>> with fluid.program_guard(fluid.Program(), fluid.Program()):
        ...     y = fluid.layers.relu(fluid.data("x", [None, 4]))
        ...     [op.type for op in fluid.default_main_program().global_block().ops]
        ['relu']
    """
    return _DEFAULTS.main


def default_startup_program() -> Program:
    """Returns the program that initializes parameters.

    Examples:
        >>> from jaxfleet import fluid
        >>> with fluid.program_guard(fluid.Program(), fluid.Program()):
        ...     y = fluid.layers.fc(fluid.data("x", [None, 4]), 2)
        ...     [op.type for op in fluid.default_startup_program().global_block().ops]
        ['fill_constant', 'uniform_random']
    """
    return _DEFAULTS.startup


def switch_main_program(program: Program) -> Program:
    """Sets the default main program and returns the previous one."""
    old, _DEFAULTS.main = _DEFAULTS.main, _program(program)
    return old


def switch_startup_program(program: Program) -> Program:
    """Sets the default startup program and returns the previous one."""
    old, _DEFAULTS.startup = _DEFAULTS.startup, _program(program)
    return old


@contextmanager
def program_guard(main_program: Program, startup_program: Program | None = None) -> Iterator[None]:
    """Adds to other programs within a `with` block; TypeError if an argument is not a Program.

    Examples:
        >>> from jaxfleet import fluid
        >>> main, startup = fluid.Program(), fluid.Program()
        >>> with fluid.program_guard(main, startup):
        ...     y = fluid.layers.fc(fluid.data("x", [None, 4]), 2)
        >>> len(main.global_block().ops), len(startup.global_block().ops)
        (2, 2)
    """
    old = switch_main_program(main_program)
    old_startup = None
    try:
        if startup_program is not None:
            old_startup = switch_startup_program(startup_program)
        yield
    finally:
        switch_main_program(old)
        if old_startup is not None:
            switch_startup_program(old_startup)


def _program(program: Program) -> Program:
    check_type(program, "a program", Program)
    return program


def _seed(seed: int) -> int:
    if not isinstance(seed, int):
        raise mistake(f"a random seed is an int, not {type(seed).__name__}")
    return seed


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]


K = TypeVar("K")
T = TypeVar("T")


class VersionCache(Generic[T]):
    """Caches one value for each program, and recomputes it when the program has changed.

    The value must not refer to the program and so keep it alive.
    """

    def __init__(self, make: Callable[[Program], T]) -> None:
        self._make = make
        self._known: WeakKeyDictionary[Program, tuple[int, T]] = WeakKeyDictionary()

    def get(self, program: Program) -> T:
        known = self._known.get(program)
        if known is None or known[0] != program.version:
            known = self._known[program] = (program.version, self._make(program))
        return known[1]

    def clear(self) -> None:
        self._known.clear()


class KeyedCache(VersionCache[dict[K, T]]):
    """Caches a value for each program and key, such as what is fed and fetched."""

    def __init__(self) -> None:
        super().__init__(lambda _: {})

    def find(self, program: Program, key: K, make: Callable[[], T]) -> T:
        """Returns the value of a key, made at the first call for this version of the program."""
        known = self.get(program)
        if key not in known:
            known[key] = make()
        return known[key]
