"""Strategies of the parameter server fleet: sync, async, half-async and GEO; communicator settings.

Each strategy fixes fields of the transpiler's config, whatever else a script sets in it.
`StrategyFactory` creates them.
"""

import copy
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from jaxfleet.env import read_cpu_num
from jaxfleet.errors import FieldError, UnsupportedError, WrongTypeError
from jaxfleet.fluid.argument_checks import mistake, warn_no_effect
from jaxfleet.fluid.communicator import DEFAULTS, get_communicator_flags
from jaxfleet.fluid.compiler import BuildStrategy, ExecutionStrategy
from jaxfleet.fluid.transpiler import (
    DistributedMode,
    DistributeTranspilerConfig,
    ServerRuntimeConfig,
)

_UNUSED = {"rpc_deadline": "180000", "rpc_retry_times": "3"}  # FLAGS_rpc_deadline acts instead
_REASON = (
    "gradients are sent when a step has made them, and the transport sets its own threads and "
    "retries; FLAGS_rpc_deadline limits how long a step waits"
)


class TrainerRuntimeConfig:
    """Settings of a communicator, checked and stored without effect; see `fluid.communicator`.

    Attributes:
        mode: a member of `DistributedMode`, set by a strategy.
        num_threads: the number of devices of the CPU (`CPU_NUM`).
        runtime_configs: the settings by name.
    """

    def __init__(self) -> None:
        self.mode: int | None = None
        self.num_threads = str(read_cpu_num() or 1)
        self.runtime_configs: dict[str, str] = {
            **get_communicator_flags(DistributedMode.ASYNC),
            **_UNUSED,
        }

    def set(self, name: str, value: Any) -> None:
        """Changes a setting, with a warning if its value differs.

        Raises ValueError if there is no such setting.
        """
        if name not in self.runtime_configs:
            what = f"TrainerRuntimeConfig doesn't have key: {name}"
            raise mistake(what, f"there are {', '.join(self.runtime_configs)}")
        if str(value) != self.runtime_configs[name]:
            warn_no_effect(f"TrainerRuntimeConfig's {name}", _REASON)
        self.runtime_configs[name] = str(value)

    def get_communicator_flags(self) -> dict[str, str]:
        """Returns the settings that apply in the mode, as text.

        Raises:
            ValueError: no strategy has set the mode.
        """
        if self.mode is None:
            what = "the runtime config has no mode"
            raise mistake(what, "take the one of a strategy: get_trainer_runtime_config()")
        given = {k: v for k, v in self.runtime_configs.items() if k in DEFAULTS}
        return get_communicator_flags(self.mode, given)

    def display(self, configs: Mapping[str, str]) -> None:
        """Prints settings, one per line."""
        width = max(map(len, configs), default=0)
        rows = [f"  {name:{width}}  {value}" for name, value in configs.items()]
        print("communicator:", *rows, sep="\n")  # noqa: T201  # as fluid does


T = TypeVar("T")

# The options for dumping samples, with their defaults.
_DEBUG: Mapping[str, Any] = {
    "dump_slot": False,
    "dump_converter": "",
    "dump_fields": [],
    "dump_file_num": 16,
    "dump_fields_path": "",
    "dump_param": [],
}


class DistributedStrategy:
    """Base of all strategies: five configs, each replaced by an object or updated by a dict.

    Configs are copied. After each change the strategy restores the fields that define it.
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
        """Stores options for dumping samples, with a warning; `get_debug_opt` returns them."""
        reason = "nothing is dumped; fetch_list and a FetchHandler show values while files train"
        warn_no_effect("set_debug_opt", reason)
        self.debug_opt = opt_info

    def get_debug_opt(self) -> dict[str, Any]:
        """Returns the options of `set_debug_opt` with defaults; empty if it was not called."""
        if not isinstance(self.debug_opt, Mapping):
            return {}
        return {name: type(v)(self.debug_opt.get(name, v)) for name, v in _DEBUG.items()}

    # --- the transpiler's --------------------------------------------------------------------

    def set_program_config(self, config: DistributeTranspilerConfig | Mapping[str, Any]) -> None:
        """Sets the transpiler's config, or some of its fields.

        Raises:
            ValueError: there is no such field.
            TypeError: it is neither a config nor a dict.
        """
        self._program_config = _changed(self._program_config, config)
        self.check_program_config()

    def get_program_config(self) -> DistributeTranspilerConfig:
        return self._program_config

    def check_program_config(self) -> None:
        """Sets the fields of the transpiler's config that define the strategy.

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
        return self._trainer_runtime_config

    def check_trainer_runtime_config(self) -> None:
        """Sets the fields of the communicator's config that define the strategy; likewise."""
        if self.mode is None:
            raise _derived("check_trainer_runtime_config")
        self._trainer_runtime_config.mode = self.mode

    def set_server_runtime_config(self, config: ServerRuntimeConfig | Mapping[str, Any]) -> None:
        """Sets the servers' config, or some of its fields; errors as above."""
        self._server_runtime_config = _changed(self._server_runtime_config, config)
        self.check_server_runtime_config()

    def get_server_runtime_config(self) -> ServerRuntimeConfig:
        return self._server_runtime_config

    def check_server_runtime_config(self) -> None:
        """Sets no field of the servers' config; errors as above."""
        if self.mode is None:
            raise _derived("check_server_runtime_config")

    # --- those of programs compiled for several devices --------------------------------------

    def set_execute_strategy(self, config: ExecutionStrategy | Mapping[str, Any]) -> None:
        """Sets how compiled programs run, or some fields of it; errors as above."""
        self._execute_strategy = _changed(self._execute_strategy, config)
        self.check_execute_strategy()

    def get_execute_strategy(self) -> ExecutionStrategy:
        return self._execute_strategy

    def check_execute_strategy(self) -> None:
        """Sets the fields of the execution strategy that define the strategy; errors as above."""
        raise _derived("check_execute_strategy")

    def set_build_strategy(self, config: BuildStrategy | Mapping[str, Any]) -> None:
        """Sets how programs are compiled, or some fields of it; errors as above."""
        self._build_strategy = _changed(self._build_strategy, config)
        self.check_build_strategy()

    def get_build_strategy(self) -> BuildStrategy:
        return self._build_strategy

    def check_build_strategy(self) -> None:
        """Sets the fields of the build strategy that define the strategy; errors as above."""
        raise _derived("check_build_strategy")


def _flags(*, geo: bool = False, half: bool = False, merges: bool = False) -> Mapping[str, bool]:
    return {"geo_sgd_mode": geo, "half_async": half, "completely_not_async": merges}


class _Mode(DistributedStrategy):
    """Base of the four modes: programs are asynchronous, and send when the values are computed."""

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
        """Sets the fields that define the mode."""
        self._program_config.sync_mode = False  # before runtime_split, which it excludes
        self._program_config.runtime_split_send_recv = True
        for name, value in self.fields.items():
            setattr(self._program_config, name, value)

    def check_execute_strategy(self) -> None:
        """Makes threads wait for each other if the mode requires it."""
        if self.waits:
            self._execute_strategy.use_thread_barrier = True

    def check_build_strategy(self) -> None:
        """Disables the sum of gradients over devices, since servers compute it."""
        self._build_strategy.async_mode = True


class SyncStrategy(_Mode):
    """Servers wait for all trainers at every step, and update with their mean gradient."""

    mode = DistributedMode.SYNC
    fields: ClassVar[Mapping[str, Any]] = _flags(half=True, merges=True)
    waits = True


class AsyncStrategy(_Mode):
    """Servers update with each gradient on arrival."""

    mode = DistributedMode.ASYNC
    fields: ClassVar[Mapping[str, Any]] = _flags()


class HalfAsyncStrategy(_Mode):
    """Like `AsyncStrategy`, but a trainer waits in each step until its sends have completed."""

    mode = DistributedMode.HALF_ASYNC
    fields: ClassVar[Mapping[str, Any]] = _flags(half=True)
    waits = True


class GeoStrategy(_Mode):
    """Trainers update locally, and exchange their changes every `update_frequency` steps."""

    mode = DistributedMode.GEO
    fields: ClassVar[Mapping[str, Any]] = _flags(geo=True)

    def __init__(self, update_frequency: int = 100) -> None:
        self._every = update_frequency
        super().__init__()

    def check_program_config(self) -> None:
        """Sets the fields that define the mode, and the interval of exchanges."""
        super().check_program_config()
        self._program_config.geo_sgd_need_push_nums = self._every


class StrategyFactory:
    """Creates strategies under fluid's names."""

    @staticmethod
    def create_sync_strategy() -> SyncStrategy:
        return SyncStrategy()

    @staticmethod
    def create_half_async_strategy() -> HalfAsyncStrategy:
        return HalfAsyncStrategy()

    @staticmethod
    def create_async_strategy() -> AsyncStrategy:
        return AsyncStrategy()

    @staticmethod
    def create_geo_strategy(update_frequency: int = 100) -> GeoStrategy:
        return GeoStrategy(update_frequency)


def strategy_of(given: Any) -> DistributedStrategy:
    """Returns a copy of a script's strategy; `SyncStrategy` by default.

    A transpiler's config is copied into the strategy of its mode. Raises TypeError if it is neither
    a strategy nor a config.
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
    """Returns a copy of a given config, or of the current one with changed fields."""
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
