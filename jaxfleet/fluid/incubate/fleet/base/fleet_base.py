"""The base classes of fluid's three fleets and of their optimizers.

A fleet is one object for a script's role, its programs, and the start and end of its training. The
parts that do not concern programs are in `jaxfleet.fleet`.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

from jaxfleet.cluster.roles import RoleMakerBase
from jaxfleet.cluster.roles.base import GroupedRoleMaker
from jaxfleet.errors import StrategyError
from jaxfleet.fleet import FleetBase
from jaxfleet.fluid.argument_checks import check_type, mistake
from jaxfleet.fluid.executor import Executor
from jaxfleet.fluid.framework.operator import Operator
from jaxfleet.fluid.framework.program import Program
from jaxfleet.fluid.framework.variable import Pairs, Parameter, Variable
from jaxfleet.fluid.optimizer import Optimizer
from jaxfleet.fluid.places import CPUPlace

Parameters = Sequence[Parameter | str]
NoGrad = Collection[str | Variable]


class Mode:
    """The kind of job of a fleet."""

    TRANSPILER = 1
    PSLIB = 2
    COLLECTIVE = 3


class Fleet(FleetBase, ABC):
    """The interface of all fleets, of a `Mode`; subclasses define how a job is made."""

    def __init__(self, mode: int) -> None:
        super().__init__()
        self._mode = mode
        self._executor: Executor | None = None

    def init(self, role_maker: RoleMakerBase | None = None) -> None:
        """Sets the role of this process in the job; see `FleetBase.init`.

        Raises:
            TypeError: the argument is not a role maker.
            ValueError: the environment does not describe a job.
        """
        super().init(role_maker)
        self._executor = Executor(CPUPlace())

    @property
    def executor(self) -> Executor:
        """The executor of the fleet's own programs; ValueError if `init` was not called."""
        if self._executor is None:
            raise mistake("the fleet was not initialized", "call fleet.init(role)", StrategyError)
        return self._executor

    def _check_ready(self, optimizer: Any) -> None:
        """Raises ValueError if it is not an optimizer, or `init` was not called."""
        check_optimizer(optimizer)
        if not self._is_initialized:
            what = "use fleet.init(role) to initialize the role of current node"
            raise mistake(f"{what} before optimizer.minimize(loss)", kind=StrategyError)

    @abstractmethod
    def init_worker(self) -> None:
        """Starts this process as a worker."""

    @abstractmethod
    def init_server(self, model_dir: str | None = None) -> None:
        """Starts this process as a server."""

    @abstractmethod
    def run_server(self) -> None:
        """Serves until all workers have stopped."""

    @abstractmethod
    def stop_worker(self) -> None:
        """Ends this process's part as a worker."""

    @abstractmethod
    def distributed_optimizer(self, optimizer: Any, strategy: Any = None) -> Any:
        """Returns an optimizer whose `minimize` creates the programs of a job."""

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
        """Saves the part of a program that computes targets from feeds."""

    @abstractmethod
    def save_persistables(
        self, executor: Executor, dirname: str, main_program: Program | None = None
    ) -> None:
        """Saves all persistable variables."""


class DistributedOptimizer(ABC):
    """A fleet's wrapper of a script's optimizer; the strategy is how its job is made.

    Raises:
        ValueError: it is not an optimizer.
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
        """Adds the gradients by the script's optimizer."""
        return self._optimizer.backward(
            loss, startup_program, parameter_list, no_grad_set, callbacks
        )

    def apply_gradients(self, params_grads: Pairs) -> list[Operator]:
        """Adds the updates by the script's optimizer."""
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
        """Adds gradients and updates, and creates the programs of the job."""


def check_optimizer(optimizer: Any) -> None:
    """Raises ValueError if a fleet is given something other than an optimizer."""
    if not isinstance(optimizer, Optimizer):
        what = "optimizer must be an instance of Optimizer"
        raise mistake(what, f"fluid.optimizer.Adam(1e-3), not {optimizer!r}")


def leave(role_maker: RoleMakerBase) -> None:
    """Leaves the job if its role maker supports that."""
    if isinstance(role_maker, GroupedRoleMaker):
        role_maker._finalize()


def check_saves(executor: Any, main_program: Any) -> None:
    """Checks the arguments of a fleet's save methods.

    Raises:
        TypeError: not an `Executor` (a `ParallelExecutor` is not one), or not a Program.
    """
    check_type(executor, "executor", Executor, "save with the Executor that trains")
    hint = "give the Program, and not what was compiled of it"
    check_type(main_program, "main_program", (Program, type(None)), hint)
