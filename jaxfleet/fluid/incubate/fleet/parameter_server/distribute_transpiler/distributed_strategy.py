"""Strategies of the fleet on the transpiler: how servers and trainers go together.

Each says what its transpiler's config is to be, whatever else a script sets in it, and is given
out by `StrategyFactory`.
"""

import copy
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from jaxfleet.env import read_cpu_num
from jaxfleet.errors import FieldError, UnsupportedError, WrongTypeError
from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.compiler import BuildStrategy, ExecutionStrategy
from jaxfleet.fluid.incubate.fleet.parameter_server.distribute_transpiler.runtime_config import (
    TrainerRuntimeConfig,
)
from jaxfleet.fluid.no_effect import warn_no_effect
from jaxfleet.fluid.transpiler import (
    DistributedMode,
    DistributeTranspilerConfig,
    ServerRuntimeConfig,
)

T = TypeVar("T")

# What a script may ask to have written down of its samples, and what holds where it does not.
_DEBUG: Mapping[str, Any] = {
    "dump_slot": False,
    "dump_converter": "",
    "dump_fields": [],
    "dump_file_num": 16,
    "dump_fields_path": "",
    "dump_param": [],
}


class DistributedStrategy:
    """What all strategies have: five configs, each to be read, and set whole or by a dict.

    What is set is copied. After each change the strategy sets again what makes it what it is.
    """

    mode: ClassVar[int | None] = None

    def __init__(self) -> None:
        self._program_config = DistributeTranspilerConfig()
        self._trainer_runtime_config = TrainerRuntimeConfig()
        self._server_runtime_config = ServerRuntimeConfig()
        threads = read_cpu_num() or 1
        self._execute_strategy = ExecutionStrategy()
        self._execute_strategy.num_threads = threads
        self._build_strategy = BuildStrategy()
        if threads > 1:
            reduce = BuildStrategy.ReduceStrategy.Reduce
            self._build_strategy.set_quietly("reduce_strategy", reduce)
        self.debug_opt: Mapping[str, Any] | None = None

    def set_debug_opt(self, opt_info: Mapping[str, Any]) -> None:
        """Takes what is to be dumped of samples, with a warning: `get_debug_opt` gives it back."""
        reason = "nothing is dumped; fetch_list and a FetchHandler show values while files train"
        warn_no_effect("set_debug_opt", reason)
        self.debug_opt = opt_info

    def get_debug_opt(self) -> dict[str, Any]:
        """Returns what `set_debug_opt` took, filled up; nothing where it took nothing."""
        if not isinstance(self.debug_opt, Mapping):
            return {}
        return {name: type(v)(self.debug_opt.get(name, v)) for name, v in _DEBUG.items()}

    # --- the transpiler's --------------------------------------------------------------------

    def set_program_config(self, config: DistributeTranspilerConfig | Mapping[str, Any]) -> None:
        """Sets the transpiler's config, or some of its fields.

        Raises:
            ValueError: it has no such field.
            TypeError: it is neither a config nor a dict.
        """
        self._program_config = _changed(self._program_config, config)
        self.check_program_config()

    def get_program_config(self) -> DistributeTranspilerConfig:
        """Returns the transpiler's config."""
        return self._program_config

    def check_program_config(self) -> None:
        """Sets what the strategy wants of the transpiler's config.

        Raises:
            NotImplementedError: this is the base of strategies.
        """
        raise _derived("check_program_config")

    # --- trainers' and servers' --------------------------------------------------------------

    def set_trainer_runtime_config(self, config: TrainerRuntimeConfig | Mapping[str, Any]) -> None:
        """Sets the communicator's config, or some of its settings; errors as above."""
        if isinstance(config, Mapping):
            made = copy.deepcopy(self._trainer_runtime_config)
            for name, value in config.items():
                made.set(name, value)
        else:
            made = _changed(self._trainer_runtime_config, config)
        self._trainer_runtime_config = made
        self.check_trainer_runtime_config()

    def get_trainer_runtime_config(self) -> TrainerRuntimeConfig:
        """Returns the communicator's config."""
        return self._trainer_runtime_config

    def check_trainer_runtime_config(self) -> None:
        """Sets what the strategy wants of the communicator's config.

        Raises:
            NotImplementedError: this is the base of strategies.
        """
        if self.mode is None:
            raise _derived("check_trainer_runtime_config")
        self._trainer_runtime_config.mode = self.mode

    def set_server_runtime_config(self, config: ServerRuntimeConfig | Mapping[str, Any]) -> None:
        """Sets the servers' config, or some of its fields; errors as above."""
        self._server_runtime_config = _changed(self._server_runtime_config, config)
        self.check_server_runtime_config()

    def get_server_runtime_config(self) -> ServerRuntimeConfig:
        """Returns the servers' config."""
        return self._server_runtime_config

    def check_server_runtime_config(self) -> None:
        """Wants nothing of the servers' config.

        Raises:
            NotImplementedError: this is the base of strategies.
        """
        if self.mode is None:
            raise _derived("check_server_runtime_config")

    # --- those of programs compiled for several devices --------------------------------------

    def set_execute_strategy(self, config: ExecutionStrategy | Mapping[str, Any]) -> None:
        """Sets how compiled programs run, or some fields of it; errors as above."""
        self._execute_strategy = _changed(self._execute_strategy, config)
        self.check_execute_strategy()

    def get_execute_strategy(self) -> ExecutionStrategy:
        """Returns how compiled programs run."""
        return self._execute_strategy

    def check_execute_strategy(self) -> None:
        """Sets what the strategy wants of how compiled programs run.

        Raises:
            NotImplementedError: this is the base of strategies.
        """
        raise _derived("check_execute_strategy")

    def set_build_strategy(self, config: BuildStrategy | Mapping[str, Any]) -> None:
        """Sets how programs are compiled, or some fields of it; errors as above."""
        self._build_strategy = _changed(self._build_strategy, config)
        self.check_build_strategy()

    def get_build_strategy(self) -> BuildStrategy:
        """Returns how programs are compiled."""
        return self._build_strategy

    def check_build_strategy(self) -> None:
        """Sets what the strategy wants of how programs are compiled.

        Raises:
            NotImplementedError: this is the base of strategies.
        """
        raise _derived("check_build_strategy")


class _Mode(DistributedStrategy):
    """What the four modes have in common: programs are asynchronous, and send what they made."""

    fields: ClassVar[Mapping[str, Any]] = {}
    waits: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.check_program_config()
        self.check_trainer_runtime_config()
        self.check_server_runtime_config()
        self.check_build_strategy()
        self.check_execute_strategy()

    def check_program_config(self) -> None:
        """Sets what makes the mode."""
        self._program_config.sync_mode = False  # before runtime_split, which it excludes
        self._program_config.runtime_split_send_recv = True
        for name, value in self.fields.items():
            setattr(self._program_config, name, value)

    def check_execute_strategy(self) -> None:
        """Has threads wait for each other where the mode does."""
        if self.waits:
            self._execute_strategy.use_thread_barrier = True

    def check_build_strategy(self) -> None:
        """Says that devices do not add their gradients: servers do."""
        self._build_strategy.async_mode = True


class SyncStrategy(_Mode):
    """Servers wait for all trainers at every step, and update by the mean of their gradients."""

    mode = DistributedMode.SYNC
    fields: ClassVar[Mapping[str, Any]] = {
        "geo_sgd_mode": False,
        "half_async": True,
        "completely_not_async": True,
    }
    waits = True


class AsyncStrategy(_Mode):
    """Servers update by each gradient as it comes."""

    mode = DistributedMode.ASYNC
    fields: ClassVar[Mapping[str, Any]] = {
        "geo_sgd_mode": False,
        "half_async": False,
        "completely_not_async": False,
    }


class HalfAsyncStrategy(_Mode):
    """As `AsyncStrategy`, but a trainer waits in each step until what it sent has gone."""

    mode = DistributedMode.HALF_ASYNC
    fields: ClassVar[Mapping[str, Any]] = {
        "geo_sgd_mode": False,
        "half_async": True,
        "completely_not_async": False,
    }
    waits = True


class GeoStrategy(_Mode):
    """Trainers train by themselves, and exchange every so many steps what has changed.

    Args:
        update_frequency: the steps from one exchange to the next.
    """

    mode = DistributedMode.GEO
    fields: ClassVar[Mapping[str, Any]] = {
        "geo_sgd_mode": True,
        "half_async": False,
        "completely_not_async": False,
    }

    def __init__(self, update_frequency: int = 100) -> None:
        self._every = update_frequency
        super().__init__()

    def check_program_config(self) -> None:
        """Sets what makes the mode, and how often trainers exchange."""
        super().check_program_config()
        self._program_config.geo_sgd_need_push_nums = self._every


class StrategyFactory:
    """Makes strategies, by fluid's names."""

    @staticmethod
    def create_sync_strategy() -> SyncStrategy:
        """Returns one whose servers wait for all trainers."""
        return SyncStrategy()

    @staticmethod
    def create_half_async_strategy() -> HalfAsyncStrategy:
        """Returns one whose trainers wait until what they sent has gone."""
        return HalfAsyncStrategy()

    @staticmethod
    def create_async_strategy() -> AsyncStrategy:
        """Returns one whose servers take each gradient as it comes."""
        return AsyncStrategy()

    @staticmethod
    def create_geo_strategy(update_frequency: int = 100) -> GeoStrategy:
        """Returns one whose trainers exchange every so many steps."""
        return GeoStrategy(update_frequency)


def strategy_of(given: Any) -> DistributedStrategy:
    """Returns a copy of the strategy that a script means; `SyncStrategy` where it says nothing.

    A transpiler's config is copied into the strategy whose mode it asks for.

    Raises:
        TypeError: it is neither a strategy nor a config.
    """
    if given is None:
        return SyncStrategy()
    if isinstance(given, _Mode):
        return copy.deepcopy(given)
    if not isinstance(given, DistributeTranspilerConfig):
        names = "SyncStrategy, HalfAsyncStrategy, AsyncStrategy, GeoStrategy"
        what = "In transpiler mode, strategy must be an instance of DistributeTranspilerConfig, "
        raise mistake(what + names, f"not {given!r}", WrongTypeError)
    made = _mode_of(given)
    made.set_program_config(given)
    return made


def _mode_of(config: DistributeTranspilerConfig) -> DistributedStrategy:
    if config.sync_mode or config.completely_not_async:
        return SyncStrategy()
    if config.geo_sgd_mode:
        return GeoStrategy(config.geo_sgd_need_push_nums)
    is_half = config.half_async or not config.runtime_split_send_recv
    return HalfAsyncStrategy() if is_half else AsyncStrategy()


def _changed(now: T, given: Any) -> T:
    """Returns a copy of what is given, or of what there is with some fields changed."""
    kind = type(now).__name__
    if isinstance(given, type(now)):
        return copy.deepcopy(given)
    if not isinstance(given, Mapping):
        what = f"{kind} only accept input type: dict or {kind}"
        raise mistake(what, f"not {given!r}", WrongTypeError)
    made = copy.deepcopy(now)
    for name, value in given.items():
        if not hasattr(made, name):
            raise mistake(f"{kind} doesn't have key: {name}", kind=FieldError)
        setattr(made, name, value)
    return made


def _derived(name: str) -> UnsupportedError:
    what = f"{name} must be implemented by derived class"
    return UnsupportedError(what, hint="take one of StrategyFactory")
