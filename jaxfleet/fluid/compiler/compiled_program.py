"""CompiledProgram and Graph: a program with the strategies by which it runs."""

import warnings
from collections.abc import Sequence
from typing import Any

from jaxfleet.errors import AssertedError, ProgramError, StrategyError, WrongTypeError
from jaxfleet.fluid.argument_checks import check_type, mistake
from jaxfleet.fluid.compiler.replicas import Replicas, trains
from jaxfleet.fluid.compiler.strategies import BuildStrategy, ExecutionStrategy
from jaxfleet.fluid.framework.program import Program
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.lowering.memory import MemoryBudget
from jaxfleet.fluid.places import CPUPlace, CUDAPlace, Place, default_places
from jaxfleet.fluid.scope import SharedScope
from jaxfleet.runtime.memory_report import MemoryReport
from jaxfleet.runtime.scope import Scope


class Graph:
    """A view of a program; its operators already record their inputs and outputs.

    Fluid converts a program to a graph, on which its passes work, and back. Here passes work on
    the IR's programs (`jaxfleet.passes`), so a graph only holds its program. Raises TypeError for
    anything but a Program.
    """

    def __init__(self, program: Program) -> None:
        if not isinstance(program, Program):
            raise WrongTypeError(f"a Graph is made of a Program, not of a {type(program).__name__}")
        self._program = program

    def to_program(self) -> Program:
        return self._program


_ANOTHER = "make another CompiledProgram"


class CompiledProgram:
    """A program with its strategies, compiled at its first run.

    Raises:
        TypeError: it is made of neither a Program nor a Graph.

    Examples:
        >>> import numpy as np
        >>> from jaxfleet import fluid
        >>> with fluid.program_guard(fluid.Program(), fluid.Program()):
        ...     y = fluid.data("x", [None, 2]) * 2.0
        ...     compiled = fluid.CompiledProgram(fluid.default_main_program())
        ...     exe = fluid.Executor(fluid.CPUPlace())
        ...     [value] = exe.run(compiled, feed={"x": np.ones((1, 2), "float32")}, fetch_list=[y])
        >>> value
        array([[2., 2.]], dtype=float32)
    """

    def __init__(
        self, program_or_graph: Program | Graph, build_strategy: BuildStrategy | None = None
    ) -> None:
        check_type(program_or_graph, "what a CompiledProgram is made of", (Program, Graph))
        self._program: Program | None = None
        if isinstance(program_or_graph, Program):
            self._program = program_or_graph
            program_or_graph = Graph(program_or_graph)
        self._graph = program_or_graph
        self._build_strategy = build_strategy
        self._exec_strategy: ExecutionStrategy | None = None
        self._loss_name: str | None = None
        self._share_vars_from: CompiledProgram | None = None
        self._places: Sequence[Place] | None = None
        self._is_data_parallel = False
        self._replicas: Replicas | None = None
        self._scope: Scope | None = None
        self._place: Any = None
        self._memory_budget: MemoryBudget | None = None

    def with_data_parallel(
        self,
        loss_name: str | None = None,
        build_strategy: BuildStrategy | None = None,
        exec_strategy: ExecutionStrategy | None = None,
        share_vars_from: "CompiledProgram | None" = None,
        places: Sequence[Place] | Place | None = None,
    ) -> "CompiledProgram":
        """Runs the program on every device with its share of the rows, and sums the gradients.

        Args:
            loss_name: the loss; required if there are gradients.
            build_strategy: how the program is rewritten.
            exec_strategy: how it is run.
            share_vars_from: a CompiledProgram that has run. Variables in its scope are taken from
                there, whichever scope this program runs in.
            places: the devices; by default all GPUs if the executor has one, else `CPU_NUM` CPUs.

        Returns:
            This object.

        Raises:
            AssertionError: a second call, or gradients without a loss.
        """
        if self._is_data_parallel:
            what = "with_data_parallel was called on this CompiledProgram before"
            raise mistake(what, _ANOTHER, AssertedError)
        self._is_data_parallel = True
        self._build_strategy = build_strategy or self._build_strategy
        self._exec_strategy = exec_strategy
        self._loss_name = loss_name.name if isinstance(loss_name, Variable) else loss_name
        self._share_vars_from = share_vars_from
        if isinstance(places, CPUPlace | CUDAPlace):
            places = [places]
        self._places = places
        if loss_name is None and trains(self.program):
            what = "the program computes gradients, and loss_name does not specify the loss"
            raise mistake(what, "with_data_parallel(loss_name=loss.name)", AssertedError)
        return self

    @property
    def program(self) -> Program:
        """The program to run."""
        return self._program or self._graph.to_program()

    def memory_report(self) -> MemoryReport:
        """Returns the program's memory use, before and after it was fitted to its budget.

        Raises StrategyError if it has no budget, or has not run.
        """
        if self._memory_budget is None:
            what = "memory_report: the program has no budget of memory, or has not run"
            raise StrategyError(what, hint="set build_strategy.memory_budget, and run it once")
        return self._memory_budget.report()

    def _with_inference_optimize(self, config: Any) -> "CompiledProgram":
        del config
        if self._is_data_parallel:
            what = "this CompiledProgram is for several devices, and no native predictor's"
            raise mistake(what, _ANOTHER, AssertedError)
        what = "there is no native predictor here"
        raise mistake(what, "run the program by an Executor: XLA compiles it too")

    @property
    def _is_dry_run(self) -> bool:
        return self._exec_strategy is not None and self._exec_strategy._dry_run

    def _scope_of_state(self, scope: Scope) -> Scope:
        """Returns the scope of the program's variables when it runs in `scope`."""
        shared = self._share_vars_from
        if shared is None or shared._scope is None:
            return scope
        home = shared._scope_of_state(shared._scope)
        return scope if home is scope else SharedScope(home, scope)

    def _compile(self, scope: Scope, place: Any) -> "CompiledProgram":
        """Prepares the program for a scope and place; later calls must pass the same ones.

        Raises:
            ValueError: the scope or place differs, or the program to share from is not ready.
            AssertionError: its strategies and places are not compatible.
        """
        if self._scope is not None:
            self._check_same(scope, place)
            return self
        strategy = self._build_strategy or BuildStrategy()
        if strategy.num_trainers > 1 and not self._is_data_parallel:
            what = f"{strategy.num_trainers} trainers are to sum gradients, on one device each"
            raise AssertedError(what, hint="call with_data_parallel, which sums them")
        if strategy.num_repeats > 1 and not self._is_data_parallel:
            what = "multi_batch_merge_pass is added to a program that is not rewritten for devices"
            raise AssertedError(what, hint="call with_data_parallel; one place is enough")
        if self._is_data_parallel:
            self._replicas = self._made(strategy, place)
        if strategy.memory_budget is not None:
            strategy.finalize()
            self._memory_budget = MemoryBudget(strategy.memory_budget)
        self._scope, self._place = scope, place
        return self

    def _made(self, strategy: BuildStrategy, place: Any) -> Replicas:
        self._check_shared()
        places = self._places
        if places is None:
            places = default_places(use_cuda=isinstance(place, CUDAPlace))
        endpoints = getattr(self.program, "_trainers_endpoints", [])
        if strategy.num_trainers > 1 and endpoints and not strategy.used:
            strategy.trainers_endpoints = list(endpoints)
        execution = self._exec_strategy or ExecutionStrategy()
        made = Replicas(self.program, strategy, execution, places)
        strategy.finalize()
        execution.finalize()
        return made

    def _check_same(self, scope: Scope, place: Any) -> None:
        if scope is not self._scope:
            what = "the program was compiled for another scope than it is run in"
            raise ProgramError(what, hint=_ANOTHER)
        if place != self._place:
            what = f"the program was compiled for {self._place}, and is run on {place}"
            raise ProgramError(what, hint=_ANOTHER)

    def _check_shared(self) -> None:
        shared = self._share_vars_from
        if shared is None:
            return
        if not shared._is_data_parallel:
            what = "variables are to be shared from a CompiledProgram for one device"
            raise ProgramError(what, hint="call with_data_parallel on it")
        if shared._replicas is None:
            what = "variables are to be shared from a CompiledProgram that has not run"
            raise ProgramError(what, hint="run it once before")


def warn_of_no_program() -> None:
    """Warns that a graph cannot be pruned."""
    what = "what is compiled from a Graph is not pruned: the whole program runs"
    warnings.warn(what, stacklevel=4)
