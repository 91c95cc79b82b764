"""Program: blocks that scripts build, and the two that they build by default."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jaxfleet.fluid import unique_name
from jaxfleet.fluid.block import Block
from jaxfleet.fluid.checks import check_type, mistake
from jaxfleet.fluid.copying import copied, copy_data_info, copy_parameter_info, without_backward
from jaxfleet.fluid.marks import Findings, Roles
from jaxfleet.fluid.pruning import as_inference, pruned
from jaxfleet.fluid.variable import Parameter, Variable
from jaxfleet.ir import Attr
from jaxfleet.pipeline import Pass
from jaxfleet.runtime.dump_series import begin_series, run_passes


class Program(Roles, Findings):
    """A program that is built operator by operator.

    Attributes:
        blocks: block 0 is the global one.
        current_block_idx: the block that layers add to.
        version: grows with everything that is added, removed or changed.
        _facts: what a transpiler says of the whole (`role="trainer"`); the IR's program has them
            as its attributes.
    """

    _default_seed = 0

    def __init__(self) -> None:
        Roles.__init__(self)
        Findings.__init__(self)
        self.version = 0
        self.current_block_idx = 0
        self._seed = Program._default_seed
        self._facts: dict[str, Attr] = {}
        self._readers: list[Any] = []  # loaders that its runs take batches of
        self._fleet_rows: dict[str, Any] = {}  # tables that `fleet_embedding` made a job's
        self._open_loops: list[int] = []  # numbers of the blocks of loops that are being built
        self.blocks = [Block(self, 0)]

    # --- random numbers ----------------------------------------------------------------------

    @property
    def random_seed(self) -> int:
        """What random operators start from; 0 for another one in every run."""
        return self._seed

    @random_seed.setter
    def random_seed(self, seed: int) -> None:
        self._seed = _seed(seed)
        self.version += 1

    def global_seed(self, seed: int = 0) -> None:
        """Sets the random seed of this program, and of those that are made from now on."""
        Program._default_seed = self.random_seed = _seed(seed)

    # --- what is in it -----------------------------------------------------------------------

    def global_block(self) -> Block:
        """Returns block 0."""
        return self.blocks[0]

    def block(self, index: int) -> Block:
        """Returns a block by its number."""
        return self.blocks[index]

    def current_block(self) -> Block:
        """Returns the block that layers add to."""
        return self.blocks[self.current_block_idx]

    @property
    def num_blocks(self) -> int:
        """How many blocks there are."""
        return len(self.blocks)

    def list_vars(self) -> Iterator[Variable]:
        """Yields the variables of all blocks."""
        for block in self.blocks:
            yield from block.vars.values()

    def all_parameters(self) -> list[Parameter]:
        """Returns the parameters in the order they were made."""
        return [p for block in self.blocks for p in block.all_parameters()]

    def unique_name(self, key: str) -> str:
        """Returns a name that nothing has."""
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

        Args:
            for_test: leave out backward and optimize, and tell operators that they are tested
                (`is_test`). Meant to be called before `minimize`.
        """
        if not for_test:
            return copied(self)
        return as_inference(without_backward(copied(self)), prune_read_op=False)

    def _prune(self, targets: Any) -> "Program":
        """Returns a copy with only what its targets need; see `_prune_with_input`."""
        return self._prune_with_input([], targets)

    def _prune_with_input(self, feeded_var_names: Any, targets: Any) -> "Program":
        """Returns a copy with only the operators that its targets need.

        What updates a parameter is only kept where it is a target itself.

        Args:
            feeded_var_names: names of variables that are fed: what makes them is not needed.
            targets: a Variable, an Operator or the name of a variable, or a list of them.

        Raises:
            ValueError: one of them is something else, or nothing makes it.
        """
        return pruned(self, _listed(feeded_var_names), _listed(targets))

    def _inference_optimize(self, prune_read_op: bool = True) -> "Program":
        """Returns a copy whose operators know that they are tested, without readers if asked."""
        return as_inference(copied(self), prune_read_op=prune_read_op)

    def _copy_param_info_from(self, other: "Program") -> None:
        """Makes variables parameters where another program has parameters of their names."""
        copy_parameter_info(_program(other), self)

    def _copy_data_info_from(
        self, other: "Program", pruned_origin_block_id_map: dict[int, int] | None = None
    ) -> None:
        """Makes variables data where another program has data of their names.

        Args:
            other: it.
            pruned_origin_block_id_map: the other's block of each of this one's blocks.
        """
        copy_data_info(_program(other), self, pruned_origin_block_id_map or {})

    def _copy_dist_param_info_from(self, other: "Program") -> None:
        """Takes over what a transpiler said of where another program's parameters are."""
        self._take_over(_program(other))

    def _rewrite_for_memory(self, by: Pass) -> None:
        """Runs a pass on the program in place, and notes that its memory was seen to."""
        from jaxfleet.fluid.from_ir import write_back  # noqa: PLC0415  # it is built on this
        from jaxfleet.fluid.to_ir import ir_program  # noqa: PLC0415  # as that

        write_back(self, run_passes(ir_program(self), [by], series=begin_series()))
        self._is_mem_optimized = True
        self._prints_memory = self._prints_memory or bool(getattr(by, "print_log", False))

    # --- text --------------------------------------------------------------------------------

    def to_string(self, throw_on_error: bool, with_details: bool = False) -> str:
        """Returns the program as text.

        Args:
            throw_on_error: raise where the shape of a variable is not known.
            with_details: say more of variables, and show the attributes of operators.

        Raises:
            TypeError: an argument is not a bool.
            ValueError: a shape is not known, and that was asked.
        """
        check_type(throw_on_error, "throw_on_error", bool)
        return "\n".join(block.to_string(throw_on_error, with_details) for block in self.blocks)

    def __str__(self) -> str:
        return self.to_string(throw_on_error=False)

    @property
    def desc(self) -> "Program":
        """The program: scripts write `program.desc.serialize_to_string()`."""
        return self

    def serialize_to_string(self) -> bytes:
        """Returns the program as bytes, with all that its parameters say.

        Raises:
            ProgramError: a parameter's regularization or clipping is of a script's own class.
        """
        from jaxfleet.fluid.serialize import serialize  # noqa: PLC0415  # it is built on this

        return serialize(self)

    @staticmethod
    def parse_from_string(binary_str: bytes) -> "Program":
        """Returns a program that was written as bytes.

        Raises:
            TypeError: it is not bytes.
            ProgramError: it is damaged, of a newer version, or something else altogether.
        """
        from jaxfleet.fluid.deserialize import deserialize  # noqa: PLC0415  # as serialize

        check_type(binary_str, "binary_str", bytes)
        return deserialize(binary_str)[0]


class _Defaults:
    def __init__(self) -> None:
        self.main, self.startup = Program(), Program()


_DEFAULTS = _Defaults()


def default_main_program() -> Program:
    """Returns the program that layers are added to."""
    return _DEFAULTS.main


def default_startup_program() -> Program:
    """Returns the program that gives parameters their first values."""
    return _DEFAULTS.startup


def switch_main_program(program: Program) -> Program:
    """Takes another program for layers, and returns the one before."""
    old, _DEFAULTS.main = _DEFAULTS.main, _program(program)
    return old


def switch_startup_program(program: Program) -> Program:
    """Takes another startup program, and returns the one before."""
    old, _DEFAULTS.startup = _DEFAULTS.startup, _program(program)
    return old


@contextmanager
def program_guard(main_program: Program, startup_program: Program | None = None) -> Iterator[None]:
    """Builds into other programs within a `with`.

    Raises:
        TypeError: an argument is no Program.
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
