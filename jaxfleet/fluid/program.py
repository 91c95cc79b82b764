"""Program: blocks that scripts build, and the two that they build by default."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from jaxfleet.errors import ProgramError
from jaxfleet.fluid import unique_name
from jaxfleet.fluid.block import Block
from jaxfleet.fluid.operator import ROLE
from jaxfleet.fluid.roles import OpRole
from jaxfleet.fluid.variable import Parameter, Variable
from jaxfleet.ir import Attr

_NOT_FOR_TEST = OpRole.BACKWARD | OpRole.OPTIMIZE


class Program:
    """A program that is built operator by operator.

    Attributes:
        blocks: block 0 is the global one.
        current_block_idx: the block that layers add to.
        op_role: the role of operators that are added now.
        op_role_var: the (parameter, gradient) names that they are about.
        version: grows with every operator that is added, removed or changed.
        _facts: what a transpiler says of the whole (`role="trainer"`); the IR's program has them
            as its attributes.
    """

    def __init__(self) -> None:
        self.blocks = [Block(self, 0)]
        self.current_block_idx = 0
        self.op_role = OpRole.FORWARD
        self.op_role_var: list[str] = []
        self.version = 0
        self._facts: dict[str, Attr] = {}
        self._seed = 0

    @property
    def random_seed(self) -> int:
        """What random operators start from; 0 for another one in every run."""
        return self._seed

    @random_seed.setter
    def random_seed(self, seed: int) -> None:
        if not isinstance(seed, int):
            raise ProgramError(f"a random seed is an int, not {type(seed).__name__}")
        self._seed = seed

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

    def clone(self, for_test: bool = False) -> "Program":
        """Returns a copy.

        Args:
            for_test: leave out backward and optimize, and tell operators that they are tested
                (`is_test`). Meant to be called before `minimize`.
        """
        made = copy.deepcopy(self)
        if for_test:
            for block in made.blocks:
                block.ops = [op for op in block.ops if not op.attrs[ROLE] & _NOT_FOR_TEST]
                for op in block.ops:
                    if op.has_attr("is_test"):
                        op._set_attr("is_test", True)
        return made

    def unique_name(self, key: str) -> str:
        """Returns a name that nothing has."""
        return unique_name.generate(key)

    def to_string(self, throw_on_error: bool = False, with_details: bool = False) -> str:
        """Returns the program as text.

        Raises:
            TypeError: an argument is not a bool.
        """
        for given in (throw_on_error, with_details):
            if not isinstance(given, bool):
                raise TypeError(f"to_string takes True or False, not {given!r}")
        return str(self)

    def __str__(self) -> str:
        return "\n".join(map(str, self.blocks))

    def _create_block(self, parent_idx: int | None = None) -> Block:
        parent = self.current_block_idx if parent_idx is None else parent_idx
        self.blocks.append(Block(self, len(self.blocks), parent))
        self.current_block_idx = len(self.blocks) - 1
        return self.current_block()

    def _rollback(self) -> None:
        self.current_block_idx = self.current_block().parent_idx

    @contextmanager
    def role(self, role: int, about: Sequence[str] = ()) -> Iterator[None]:
        """Gives the operators that are added within a `with` a role."""
        old = self.op_role, self.op_role_var
        self.op_role, self.op_role_var = role, list(about)
        try:
            yield
        finally:
            self.op_role, self.op_role_var = old

    def _backward_role_guard(self) -> AbstractContextManager[None]:
        return self.role(OpRole.BACKWARD)

    def _optimized_guard(self, param_and_grad: Sequence[Variable]) -> AbstractContextManager[None]:
        return self.role(OpRole.OPTIMIZE, [x.name for x in param_and_grad])

    def _lr_schedule_guard(self, is_with_opt: bool = False) -> AbstractContextManager[None]:
        return self.role(OpRole.LR_SCHED | (OpRole.OPTIMIZE if is_with_opt else 0))


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


def _program(program: object) -> Program:
    if not isinstance(program, Program):
        raise TypeError(f"a Program is wanted, not a {type(program).__name__}")
    return program
