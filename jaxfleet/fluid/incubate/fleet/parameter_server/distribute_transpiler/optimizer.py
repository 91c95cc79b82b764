"""TranspilerOptimizer: minimizes a loss, and makes the programs of a job with servers."""

from collections.abc import Callable
from typing import Any

from jaxfleet.errors import StrategyError, WrongTypeError
from jaxfleet.fluid.checks import check_type, mistake
from jaxfleet.fluid.incubate.fleet.base.fleet_base import (
    DistributedOptimizer,
    NoGrad,
    Parameters,
)
from jaxfleet.fluid.incubate.fleet.parameter_server.distribute_transpiler.distributed_strategy import (  # noqa: E501
    DistributedStrategy,
    strategy_of,
)
from jaxfleet.fluid.no_effect import warn_no_effect
from jaxfleet.fluid.operator import Operator
from jaxfleet.fluid.program import Program, default_startup_program
from jaxfleet.fluid.transpiler import DistributeTranspilerConfig
from jaxfleet.fluid.variable import Pairs, Variable

Made = Callable[[Any, Program, Program], None]  # makes a job's programs by a strategy


class TranspilerOptimizer(DistributedOptimizer):
    """What `fleet.distributed_optimizer` returns.

    Args:
        optimizer: a script's own.
        strategy: one of `StrategyFactory`, or a transpiler's config, which is copied;
            `SyncStrategy` unless given.
        transpile: makes the job's programs; `fleet.distributed_optimizer` gives it.

    Raises:
        ValueError: it is no optimizer.
        TypeError: the strategy is none.
    """

    def __init__(
        self,
        optimizer: Any,
        strategy: DistributedStrategy | DistributeTranspilerConfig | None = None,
        transpile: Made | None = None,
    ) -> None:
        super().__init__(optimizer, strategy_of(strategy))
        self._transpile = transpile

    def minimize(
        self,
        loss: Variable,
        scopes: Any = None,
        startup_program: Program | None = None,
        parameter_list: Parameters | None = None,
        no_grad_set: NoGrad | None = None,
    ) -> tuple[list[Operator], Pairs]:
        """Adds what trains the loss, and makes of it what this process of the job runs.

        `fleet.main_program` and `fleet.startup_program` are the programs.

        Args:
            loss: one.
            scopes: warned of; variables are in the scope that an Executor is given.
            startup_program: where the parameters begin; the default one unless given.
            parameter_list: which are trained; all unless given.
            no_grad_set: variables at which gradients end.

        Raises:
            TypeError: a list is given, of losses or of programs.
            ValueError: it was not made by a fleet.
            ConnectError: a worker waited for servers in vain.
        """
        if scopes is not None:
            warn_no_effect("minimize's scopes", "variables are in the scope that run is given")
        if isinstance(loss, list):
            what = "DistributedTranspiler's minimize can not accept loss with list"
            raise mistake(what, "give one loss", WrongTypeError)
        if isinstance(startup_program, list):
            what = "DistributedTranspiler's minimize can not accept program with list"
            raise mistake(what, "give one startup program", WrongTypeError)
        check_type(loss, "a loss", Variable)
        if self._transpile is None:
            what = "nobody makes the programs of a job of what this optimizer minimizes"
            raise mistake(what, "use what fleet.distributed_optimizer returns", StrategyError)
        startup = startup_program or default_startup_program()
        made = self._optimizer.minimize(loss, startup, parameter_list, no_grad_set)
        self._transpile(self._strategy, loss.block.program, startup)
        return made
