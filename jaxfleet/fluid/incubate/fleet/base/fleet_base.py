"""The base of fluid's three fleets, and of what they make of an optimizer.

A fleet is one object that a script asks who it is, has make its programs, and tells when training
begins and ends. What of it knows nothing of programs is `jaxfleet.fleet`'s.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

from jaxfleet.errors import StrategyError
from jaxfleet.fleet import FleetBase
from jaxfleet.fleet.roles import RoleMakerBase
from jaxfleet.fleet.roles.grouped import GroupedRoleMaker
from jaxfleet.fluid.checks import check_type, mistake
from jaxfleet.fluid.executor import Executor
from jaxfleet.fluid.operator import Operator
from jaxfleet.fluid.optimizer import Optimizer
from jaxfleet.fluid.places import CPUPlace
from jaxfleet.fluid.program import Program
from jaxfleet.fluid.variable import Pairs, Parameter, Variable

Parameters = Sequence[Parameter | str]
NoGrad = Collection[str | Variable]


class Mode:
    """What kind of job a fleet is for."""

    TRANSPILER = 1
    PSLIB = 2
    COLLECTIVE = 3


class Fleet(FleetBase, ABC):
    """What every fleet answers; subclasses say how a job is made.

    Args:
        mode: of `Mode`.
    """

    def __init__(self, mode: int) -> None:
        super().__init__()
        self._mode = mode
        self._executor: Executor | None = None

    def init(self, role_maker: RoleMakerBase | None = None) -> None:
        """Says which process of the job this is; see `FleetBase.init`.

        Raises:
            TypeError: what is given is no role maker.
            ValueError: the environment is no job's.
        """
        super().init(role_maker)
        self._executor = Executor(CPUPlace())

    @property
    def executor(self) -> Executor:
        """What runs the fleet's own programs.

        Raises:
            ValueError: the fleet was not told who it is.
        """
        if self._executor is None:
            raise mistake("the fleet was not initialized", "call fleet.init(role)", StrategyError)
        return self._executor

    @abstractmethod
    def init_worker(self) -> None:
        """Begins to be a worker."""

    @abstractmethod
    def init_server(self, model_dir: str | None = None) -> None:
        """Begins to be a server."""

    @abstractmethod
    def run_server(self) -> None:
        """Serves until all workers have stopped."""

    @abstractmethod
    def stop_worker(self) -> None:
        """Ends being a worker."""

    @abstractmethod
    def distributed_optimizer(self, optimizer: Any, strategy: Any = None) -> Any:
        """Returns an optimizer whose `minimize` makes the programs of a job."""

    @abstractmethod
    def save_inference_model(
        self,
        executor: Executor,
        dirname: str,
        feeded_var_names: Sequence[str],
        target_vars: Sequence[Variable],
        main_program: Program | None = None,
        export_for_deployment: bool = True,
    ) -> None:
        """Saves what computes some targets from what is fed."""

    @abstractmethod
    def save_persistables(
        self, executor: Executor, dirname: str, main_program: Program | None = None
    ) -> None:
        """Saves all that outlives a run."""


class DistributedOptimizer(ABC):
    """What a fleet makes of an optimizer.

    Args:
        optimizer: a script's own.
        strategy: how its job is made.

    Raises:
        ValueError: it is no optimizer.
    """

    def __init__(self, optimizer: Any, strategy: Any = None) -> None:
        check_optimizer(optimizer)
        self._optimizer: Optimizer = optimizer
        self._strategy = strategy

    def backward(
        self,
        loss: Variable,
        startup_program: Program | None = None,
        parameter_list: Parameters | None = None,
        no_grad_set: NoGrad | None = None,
        callbacks: Sequence[Any] | None = None,
    ) -> Pairs:
        """Adds the gradients, as the script's optimizer does."""
        return self._optimizer.backward(
            loss, startup_program, parameter_list, no_grad_set, callbacks
        )

    def apply_gradients(self, params_grads: Pairs) -> list[Operator]:
        """Adds the updates, as the script's optimizer does."""
        return self._optimizer.apply_gradients(params_grads)

    @abstractmethod
    def minimize(
        self,
        losses: Any,
        scopes: Any = None,
        startup_programs: Any = None,
        parameter_list: Parameters | None = None,
        no_grad_set: NoGrad | None = None,
    ) -> Any:
        """Adds both, and makes the programs of the job."""


def check_optimizer(optimizer: Any) -> None:
    """Checks what a fleet is to distribute.

    Raises:
        ValueError: it is no optimizer.
    """
    if not isinstance(optimizer, Optimizer):
        what = "optimizer must be an instance of Optimizer"
        raise mistake(what, f"fluid.optimizer.Adam(1e-3), not {optimizer!r}")


def leave(role_maker: RoleMakerBase) -> None:
    """Leaves the others, of a role maker that knows the way to all."""
    if isinstance(role_maker, GroupedRoleMaker):
        role_maker._finalize()


def check_saves(executor: Any, main_program: Any) -> None:
    """Checks what a fleet is to save with.

    Raises:
        TypeError: it is no `Executor` (a `ParallelExecutor` is none), or the program is none.
    """
    check_type(executor, "executor", Executor, "save with the Executor that trains")
    hint = "give the Program, and not what was compiled of it"
    check_type(main_program, "main_program", (Program, type(None)), hint)
