"""CollectiveOptimizer: minimizes a loss and creates a rank's program as its strategy specifies."""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from jaxfleet.env import preset_flag
from jaxfleet.errors import AssertedError, StrategyError, UnsupportedError
from jaxfleet.fleet import FleetBase
from jaxfleet.fluid import layers
from jaxfleet.fluid.argument_checks import check_type, mistake
from jaxfleet.fluid.compiler import BuildStrategy, CompiledProgram, ExecutionStrategy
from jaxfleet.fluid.contrib.mixed_precision import use_mixed_precision
from jaxfleet.fluid.framework.operator import Operator
from jaxfleet.fluid.framework.program import Program, default_startup_program, program_guard
from jaxfleet.fluid.framework.variable import Pairs, Variable
from jaxfleet.fluid.incubate.fleet.base.fleet_base import DistributedOptimizer, NoGrad, Parameters
from jaxfleet.fluid.optimizer import Lamb, RecomputeOptimizer
from jaxfleet.fluid.transpiler import DistributeTranspiler, DistributeTranspilerConfig

_OURS: Mapping[str, Any] = {
    "use_local_sgd": False,
    "use_dist_fc": False,
    "dist_fc_config": None,
    "mode": "nccl2",
    "collective_mode": None,
    "forward_recompute": False,
    "recompute_checkpoints": [],
    "use_amp": False,
    "amp_loss_scaling": 2.0**15,
    "exec_strategy": None,
    "_ut4grad_allreduce": False,
}


class LambConfig:
    """Options of Lamb; empty, as in fluid."""


class DistFCConfig:
    """Options of a layer distributed over ranks; empty, as in fluid."""


class DistributedStrategy(BuildStrategy):
    """How ranks train together; extends `BuildStrategy`.

    Attributes:
        mode: `nccl2`, where compiled programs sum gradients; `collective`, where operators do.
        collective_mode: in `collective` mode, `grad_allreduce` or `local_sgd`.
        use_local_sgd: acts: `mode="collective"` with `local_sgd`.
        use_dist_fc: rejected: a layer whose classes are distributed over ranks.
        dist_fc_config: rejected together with `use_dist_fc`, whose config it is.
        forward_recompute: acts: backward recomputes forward, from checkpoint to checkpoint.
        recompute_checkpoints: acts: the variables that are kept, or their names.
        use_amp: acts: products are in float16, and the loss has a dynamic scale.
        amp_loss_scaling: acts: the initial scale.
        exec_strategy: how compiled programs run.
        _ut4grad_allreduce: acts: `mode="collective"` with `grad_allreduce`.
    """

    _defaults: ClassVar[Mapping[str, Any]] = {**BuildStrategy._defaults, **_OURS}
    _checks: ClassVar[Mapping[str, Callable[[Any], bool]]] = {
        **BuildStrategy._checks,
        **dict.fromkeys(_OURS, lambda _: True),  # checked by an optimizer, as in fluid
        "exec_strategy": lambda value: isinstance(value, ExecutionStrategy),
        "mode": lambda value: value in {"nccl2", "collective"},
    }
    _acting: ClassVar[frozenset[str]] = BuildStrategy._acting | {
        *(
            "use_local_sgd",
            "use_dist_fc",
            "dist_fc_config",
            "mode",
            "collective_mode",
            "exec_strategy",
        ),
        *("_ut4grad_allreduce", "forward_recompute", "recompute_checkpoints"),
        *("use_amp", "amp_loss_scaling"),
    }

    def __init__(self) -> None:
        super().__init__()
        self.exec_strategy = ExecutionStrategy()


Programs = Callable[[Program, Program, Any], None]  # receives the origin, startup and main
_RECOMPUTES = frozenset({"RecomputeOptimizer", "OptimizerWithMixedPrecision"})
_HALVES = frozenset({"OptimizerWithMixedPrecision", "DGCMomentumOptimizer"})
_MOST_THREADS = 4  # more are seldom of use, according to fluid


class CollectiveOptimizer(DistributedOptimizer):
    """The optimizer that the collective fleet's `distributed_optimizer` returns.

    Args:
        optimizer: the script's own.
        strategy: how ranks train together; it is copied.
        fleet: the participants; the module's own fleet, unless given.
        told: receives the programs that `minimize` creates.

    Raises:
        ValueError: it is not an optimizer, or `recompute_checkpoints` is not a list.
        TypeError: the strategy is not a DistributedStrategy.
    """

    def __init__(
        self,
        optimizer: Any,
        strategy: DistributedStrategy | None = None,
        fleet: FleetBase | None = None,
        told: Programs | None = None,
    ) -> None:
        given = DistributedStrategy() if strategy is None else strategy
        check_type(given, "a strategy", DistributedStrategy, "collective.DistributedStrategy()")
        if not isinstance(given.recompute_checkpoints, list):
            what = "DistStrategy.recompute_checkpoints should be a List"
            raise mistake(what, f"not {given.recompute_checkpoints!r}", StrategyError)
        kept = {id(one): one for one in given.recompute_checkpoints}  # without their programs
        super().__init__(optimizer, copy.deepcopy(given, kept))
        self.print_config = False
        self._fleet, self._told = fleet, told
        self._compiled_program: CompiledProgram | None = None
        self._loss: Variable | None = None

    def minimize(  # type: ignore[override]  # fluid's own takes no scopes
        self,
        loss: Variable | Sequence[Variable],
        startup_program: Program | None = None,
        parameter_list: Parameters | None = None,
        no_grad_set: NoGrad | None = None,
    ) -> tuple[list[Operator], Pairs]:
        """Adds gradients and updates, and creates this rank's program: `fleet.main_program`.

        Arguments are those of `Optimizer.minimize`; a list of losses of one program is summed.

        Raises:
            ValueError: the strategy's fields, or the optimizer, exclude each other.
            AssertionError: likewise, where fluid asserts it.
            NotImplementedError: the strategy requests `use_dist_fc`.
            TypeError: the argument is not a loss.
        """
        losses: list[Any] = list(loss) if isinstance(loss, list | tuple) else [loss]
        for one in losses:
            check_type(one, "a loss", Variable)
        loss = _summed(losses)
        self._endpoints()  # raises if they are not set, before anything is added
        self._check_optimizer()
        main = loss.block.program
        startup = startup_program or default_startup_program()
        self._loss = loss
        self._check_collective_mode(main, self._optimizer, self._strategy)
        made = self._minimized(loss, startup, parameter_list, no_grad_set)
        origin = main.clone()
        ready = self._try_to_compile(startup, main)
        if self._told is not None:
            self._told(origin, startup, ready)
        return made

    def _minimized(
        self,
        loss: Variable,
        startup: Program,
        parameters: Parameters | None,
        no_grad: NoGrad | None,
    ) -> tuple[list[Operator], Pairs]:
        """Minimizes by the script's optimizer, wrapped as the strategy specifies."""
        strategy, optimizer = self._strategy, self._optimizer
        if strategy.forward_recompute:
            optimizer = RecomputeOptimizer(optimizer)
            optimizer._set_checkpoints(strategy.recompute_checkpoints)
        ops, pairs = optimizer.minimize(loss, startup, parameters, no_grad)
        if strategy.use_amp:
            main, scale = loss.block.program, strategy.amp_loss_scaling
            ops = [*ops, use_mixed_precision(main, startup, scale)]
        return ops, pairs

    def _check_optimizer(self) -> None:
        """Checks that the strategy's wrappers accept the script's optimizer."""
        strategy, kind = self._strategy, type(self._optimizer).__name__
        if strategy.forward_recompute:
            if not strategy.recompute_checkpoints:
                what = "please set strategy.recompute_checkpoints"
                hint = "forward_recompute keeps these variables"
                raise mistake(what, hint, StrategyError)
            if kind in _RECOMPUTES:
                self.raiseOptimizeError("forward_recompute", kind)
        if strategy.use_amp and kind in _HALVES:
            self.raiseOptimizeError("use_amp", kind)

    def raiseOptimizeError(self, strategy_name: str, optimize_name: str) -> None:  # noqa: N802
        """Raises ValueError: the optimizer already does what a field of the strategy requests."""
        what = f"can not use {optimize_name} when you set DistStrategy.{strategy_name} as True"
        raise mistake(what, "leave out one of the two", StrategyError)

    def _check_condition(self, name: str, **kwargs: bool) -> None:
        """Raises AssertionError for a field of the strategy that another one excludes."""
        for other, is_asked in kwargs.items():
            if is_asked:
                what = f"you can't use {name} and {other} together"
                raise mistake(what, "leave out one of the two", AssertedError)

    def _check_collective_mode(
        self, main_program: Program, optimizer: Any, strategy: DistributedStrategy
    ) -> None:
        """Checks a strategy's modes, and sets those that other fields imply."""
        del main_program  # fluid recorded the optimizer there
        uses = {
            "use_dgc": type(optimizer).__name__ == "DGCMomentumOptimizer",
            "use_lamb": isinstance(optimizer, Lamb),
        }
        if strategy.use_local_sgd:
            strategy.mode, strategy.collective_mode = "collective", "local_sgd"
            self._check_condition("use_local_sgd", use_dist_fc=strategy.use_dist_fc, **uses)
        if strategy.use_dist_fc:
            self._check_condition("use_dist_fc", use_local_sgd=strategy.use_local_sgd, **uses)
            if strategy.dist_fc_config is None:
                what = "DistributedStrategy.dist_fc_config should be set"
                raise mistake(what, "DistFCConfig()", AssertedError)
            what = "use_dist_fc: no layer here has its classes over ranks"
            raise mistake(what, "an fc and softmax_with_cross_entropy", UnsupportedError)
        if strategy._ut4grad_allreduce:
            strategy.mode, strategy.collective_mode = "collective", "grad_allreduce"
            self._check_condition("_ut4grad_allreduce", **uses)
        modes = {"local_sgd", "grad_allreduce"}
        if strategy.collective_mode in modes and strategy.mode != "collective":
            what = "local_sgd and grad_allreduce can be used under collective mode"
            raise mistake(what, "strategy.mode = 'collective'", AssertedError)

    # --- a rank's program --------------------------------------------------------------------

    def _try_to_compile(self, startup_program: Program, main_program: Program) -> Any:
        """Creates and returns this rank's program, compiled in `nccl2` mode.

        With a single worker the program is not transpiled.
        """
        strategy = self._strategy
        self._set_streams(strategy, strategy.exec_strategy)
        workers = self._who().worker_num()
        if workers > 1:
            self._transpile(startup_program, main_program)
        if strategy.mode == "collective":
            return main_program
        strategy.num_trainers, strategy.trainer_id = workers, self._who().worker_index()
        if workers > 1:
            strategy.trainers_endpoints = self._endpoints()
        assert self._loss is not None
        self._compiled_program = CompiledProgram(main_program).with_data_parallel(
            loss_name=self._loss.name, build_strategy=strategy, exec_strategy=strategy.exec_strategy
        )
        return self._compiled_program

    def _set_streams(self, strategy: DistributedStrategy, execution: ExecutionStrategy) -> None:
        """Sets the numbers of streams of sums and of their threads, by fluid's rules."""
        if self._node_num() <= 1:
            _reset(strategy, "since you only have 1 node")
        if strategy.sync_batch_norm:
            _reset(strategy, "since sync_batch_norm is set")
            execution.num_threads = 1
        elif preset_flag("sync_nccl_allreduce") in {None, "1"}:
            many = 2 if strategy.use_hierarchical_allreduce else 1
            execution.num_threads = many * strategy.nccl_comm_num + 1
            if execution.num_threads > _MOST_THREADS:
                text = f"num_threads is {execution.num_threads}, by nccl_comm_num"
                warnings.warn(f"{text}: more than {_MOST_THREADS} seldom pay", stacklevel=4)

    def _transpile(self, startup_program: Program, main_program: Program) -> None:
        strategy, endpoints = self._strategy, self._endpoints()
        config = DistributeTranspilerConfig()
        config.mode, config.collective_mode = strategy.mode, strategy.collective_mode
        config.nccl_comm_num = strategy.nccl_comm_num
        config.use_hierarchical_allreduce = strategy.use_hierarchical_allreduce
        inner = strategy.hierarchical_allreduce_inter_nranks
        config.hierarchical_allreduce_inter_nranks = inner
        config.wait_port = False  # the join of the group waits, and reports missing processes
        number = self._who().worker_index()
        if self.print_config:
            text = f"rank {number} of {len(endpoints)}, mode {config.mode}: {endpoints}"
            print(text)  # noqa: T201  # requested
        DistributeTranspiler(config).transpile(
            number,
            main_program,
            trainers=",".join(endpoints),
            startup_program=startup_program,
            current_endpoint=endpoints[number],
        )

    def _get_node_ips_from_endpoints(self, endpoints: Sequence[str]) -> list[str]:
        """Returns the unique addresses of machines, in order."""
        return list(dict.fromkeys(endpoint.rpartition(":")[0] for endpoint in endpoints))

    def _node_num(self) -> int:
        """Returns the number of machines; 1 if there are no endpoints."""
        return len(self._get_node_ips_from_endpoints(self._endpoints())) or 1

    def _endpoints(self) -> list[str]:
        """Returns an endpoint of each worker.

        Of the processes of a cluster only the address of the first is known, where all meet; the
        others are never contacted, so placeholders stand for them.
        """
        known = self._who().role_maker.get_trainer_endpoints()
        return [endpoint or f"worker{at}:1" for at, endpoint in enumerate(known)]

    def _who(self) -> FleetBase:
        if self._fleet is None:
            # The fleet imports this module.
            from jaxfleet.fluid.incubate.fleet.collective.collective_fleet import fleet  # noqa: PLC0415

            self._fleet, self._told = fleet, fleet.take
        return self._fleet


def _summed(losses: list[Variable]) -> Variable:
    """Returns the loss to train: one, or the sum of several of one program."""
    programs = {id(loss.block.program): loss.block.program for loss in losses}
    if len(programs) != 1:
        what = f"minimize is given {len(losses)} losses of {len(programs)} programs"
        raise mistake(what, "one loss, or several of one program")
    if len(losses) == 1:
        return losses[0]
    with program_guard(*programs.values()):
        return layers.sums(losses)


def _reset(strategy: DistributedStrategy, why: str) -> None:
    """Resets several streams, or levels, of sums to one."""
    if strategy.nccl_comm_num > 1:
        warnings.warn(f"nccl_comm_num is set to 1 {why}", stacklevel=5)
    if strategy.use_hierarchical_allreduce:
        warnings.warn(f"use_hierarchical_allreduce is set to False {why}", stacklevel=5)
    strategy.nccl_comm_num, strategy.use_hierarchical_allreduce = 1, False
