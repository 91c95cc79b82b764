"""BuildStrategy and ExecutionStrategy, and the PassBuilder of passes that a script adds.

XLA does most of what these control: fusion, ordering, memory reuse, overlap. A field with an effect
has fluid's effect; one that is only a hint to a compiler is stored silently, since no result
depends on it (`_hints`); any other warns when it is set (`_reasons`). `docs/fluid-arguments.md`
lists every field. The fields are frozen after the first compilation. Fluid's pass builder lists all
passes of its compiler; here scripts can add the one pass without a field.
"""

import difflib
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, ClassVar

from jaxfleet.errors import FieldError, FinalError, StrategyError
from jaxfleet.fluid.argument_checks import mistake, warn_no_effect
from jaxfleet.fluid.lowering.memory import is_budget

_MERGE, _REPEATS = "multi_batch_merge_pass", "num_repeats"


class BuildPass:
    """One pass, `multi_batch_merge_pass`, with its attributes; ProgramError for any other."""

    def __init__(self, pass_type: str) -> None:
        if pass_type != _MERGE:
            hint = f"'{_MERGE}' can be added; fields of the BuildStrategy and XLA do the rest"
            raise mistake(f"there is no pass {pass_type!r} to add to a BuildStrategy", hint)
        self._type = pass_type
        self._attrs: dict[str, Any] = {}

    def type(self) -> str:
        return self._type

    def set(self, name: str, value: Any) -> None:
        """Sets an attribute.

        Raises ProgramError if there is no such attribute, or the value is invalid.
        """
        if name != _REPEATS or not isinstance(value, int) or value < 1:
            what = f"{self._type} has no {name}={value!r}"
            raise mistake(what, f"set('{_REPEATS}', n), a number of at least 1")
        self._attrs[name] = value

    @property
    def num_repeats(self) -> int:
        """How many times gradients are computed for an update; ProgramError if it is not set."""
        if _REPEATS not in self._attrs:
            raise mistake(f"{self._type} has no number of repeats", f"set('{_REPEATS}', n)")
        repeats: int = self._attrs[_REPEATS]
        return repeats


class PassBuilder:
    """The passes, in order."""

    def __init__(self) -> None:
        self._passes: list[BuildPass] = []

    def all_passes(self) -> list[BuildPass]:
        return list(self._passes)

    def append_pass(self, pass_type: str) -> BuildPass:
        return self.insert_pass(len(self._passes), pass_type)

    def insert_pass(self, idx: int, pass_type: str) -> BuildPass:
        """Inserts a pass at an index and returns it.

        Raises ProgramError if there is no such pass, or the index is out of range.
        """
        if not 0 <= idx <= len(self._passes):
            raise mistake(f"pass {idx} cannot be inserted among {len(self._passes)}")
        made = BuildPass(pass_type)
        self._passes.insert(idx, made)
        return made

    def remove_pass(self, idx: int) -> None:
        """Removes the pass at an index; ProgramError if the index is out of range."""
        if not 0 <= idx < len(self._passes):
            raise mistake(f"there is no pass {idx} among {len(self._passes)}")
        del self._passes[idx]


class ReduceStrategy:
    """How gradients are summed: on all devices, or on one device that updates for all."""

    AllReduce, Reduce = "AllReduce", "Reduce"


class GradientScaleStrategy:
    """The initial gradient of the loss: one over the devices, one, or fed."""

    CoeffNumDevice, One, Customized = "CoeffNumDevice", "One", "Customized"


class _Strategy:
    """Fields that are checked on assignment and frozen after the first use."""

    _defaults: ClassVar[Mapping[str, Any]]
    _checks: ClassVar[Mapping[str, Callable[[Any], bool]]]
    _acting: ClassVar[frozenset[str]]
    _hints: ClassVar[frozenset[str]]
    _reasons: ClassVar[Mapping[str, str]]

    used: bool  # a program was compiled with it, so it is frozen

    def __init__(self) -> None:
        object.__setattr__(self, "used", False)
        for name, value in self._defaults.items():
            made = type(value)(value) if isinstance(value, list | dict) else value
            object.__setattr__(self, name, made)

    @classmethod
    def no_ops(cls) -> tuple[str, ...]:
        """Returns the fields that are stored without effect."""
        return tuple(name for name in cls._defaults if name not in cls._acting)

    @classmethod
    def effect_of(cls, name: str) -> str:
        """Returns the effect of a field: `acts`, `hint` or `warns`."""
        if name in cls._acting:
            return "acts"
        return "hint" if name in cls._hints else "warns"

    def finalize(self) -> None:
        """Freezes the fields."""
        object.__setattr__(self, "used", True)

    def __getattr__(self, name: str) -> Any:
        raise _unknown(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        kind = type(self).__name__
        if name not in self._defaults:
            raise _unknown(self, name)
        if self.used:
            what = f"{kind}.{name} is set to {value!r} after a program was made with the strategy"
            raise FinalError(what, hint=f"make another {kind} for the next program")
        if not self._checks[name](value):
            what = f"{kind}.{name} cannot be {value!r}"
            raise StrategyError(what, hint=f"it is {self._defaults[name]!r} unless set")
        is_default = value == self._defaults[name] or (value is False and not self._defaults[name])
        if name in self._reasons and not is_default:
            warn_no_effect(f"{kind}.{name}", self._reasons[name])
        object.__setattr__(self, name, value)

    def set_quietly(self, name: str, value: Any) -> None:
        """Sets a field without the warning that it has no effect."""
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        changed = {n: getattr(self, n) for n, v in self._defaults.items() if getattr(self, n) != v}
        return f"{type(self).__name__}({', '.join(f'{n}={v!r}' for n, v in changed.items())})"


def _unknown(strategy: _Strategy, name: str) -> FieldError:
    near = difflib.get_close_matches(name, strategy._defaults)
    hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(strategy._defaults)}"
    return FieldError(f"{type(strategy).__name__} has no field '{name}'", hint=hint)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_bool_or_none(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_positive(value: Any) -> bool:
    return _is_count(value) and value > 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)


def _is_one_of(kind: type) -> Callable[[Any], bool]:
    known = [value for name, value in vars(kind).items() if not name.startswith("_")]
    return lambda value: value in known


class BuildStrategy(_Strategy):
    """How a program is rewritten for several devices.

    Attributes:
        reduce_strategy: warns: `Reduce` is computed as `AllReduce`, with the same results.
        gradient_scale_strategy: acts.
        sync_batch_norm: acts: batch norm statistics cover all devices.
        num_trainers: acts: the gradient of the loss is also divided by it.
        trainer_id: acts: the trainer that this process is.
        trainers_endpoints: acts: one for each trainer.
        nccl_comm_num: acts: gradient sums are distributed over that many rings, and sums of
            different rings are never joined (the pass `deal_rings`).
        use_hierarchical_allreduce: acts: sums are made within groups of devices, then across (the
            pass `two_levels`), if the devices divide into such groups; otherwise it warns.
        hierarchical_allreduce_inter_nranks: acts: the devices of such a group; those of one
            process if 0 or 1.
        debug_graphviz_path: acts: the program for devices is written there, as text.
        fuse_all_reduce_ops: acts over CPUs of several processes: small gradients are summed as one,
            unless it is False. Elsewhere XLA decides whether to join sums.
        async_mode: acts: devices would not sum their gradients, which is rejected.
        memory_budget: acts, and is an addition to fluid: the memory that the program may use on its
            one device besides state, feeds and fetches. An int is bytes, a float a fraction of its
            unconstrained use.
    """

    def for_trainer(self, num_trainers: int, trainer_id: int) -> "BuildStrategy":
        """Returns a mutable copy for one of several trainers.

        The numbers are also recorded in the original, even if it is frozen: fluid's
        `ParallelExecutor` sets them in every strategy passed to it.
        """
        made = type(self)()
        for name in self._defaults:
            object.__setattr__(made, name, getattr(self, name))
        object.__setattr__(made, "_builder", self._builder)
        made.num_trainers, made.trainer_id = num_trainers, trainer_id
        for name in ("num_trainers", "trainer_id"):
            object.__setattr__(self, name, getattr(made, name))
        return made

    def _finalize_strategy_and_create_passes(self) -> PassBuilder:
        """Freezes the fields and returns the pass builder."""
        self.finalize()
        builder = self._builder or PassBuilder()
        object.__setattr__(self, "_builder", builder)
        return builder

    @property
    def num_repeats(self) -> int:
        """How many times gradients are computed for an update: see `multi_batch_merge_pass`.

        Raises ProgramError if the pass was added without the number.
        """
        passes = self._builder.all_passes() if self._builder else []
        return prod(one.num_repeats for one in passes)

    ReduceStrategy = ReduceStrategy
    GradientScaleStrategy = GradientScaleStrategy

    _builder: PassBuilder | None = None
    _defaults: ClassVar[Mapping[str, Any]] = {
        "reduce_strategy": ReduceStrategy.AllReduce,
        "gradient_scale_strategy": GradientScaleStrategy.CoeffNumDevice,
        "debug_graphviz_path": "",
        "enable_sequential_execution": False,
        "enable_backward_optimizer_op_deps": True,
        "remove_unnecessary_lock": True,
        "cache_runtime_context": False,
        "num_trainers": 1,
        "trainer_id": 0,
        "trainers_endpoints": [],
        "nccl_comm_num": 1,
        "use_hierarchical_allreduce": False,
        "hierarchical_allreduce_inter_nranks": 0,
        "fuse_elewise_add_act_ops": False,
        "fuse_bn_act_ops": False,
        "enable_auto_fusion": False,
        "fuse_relu_depthwise_conv": False,
        "fuse_all_optimizer_ops": False,
        "fuse_all_reduce_ops": True,
        "fuse_broadcast_ops": True,
        "sync_batch_norm": False,
        "memory_optimize": None,
        "memory_budget": None,
        "enable_inplace": True,
        "is_distribution": False,
        "async_mode": False,
        "mkldnn_enabled_op_types": {},
    }
    _checks: ClassVar[Mapping[str, Callable[[Any], bool]]] = {
        **dict.fromkeys(_defaults, _is_bool),
        "reduce_strategy": _is_one_of(ReduceStrategy),
        "gradient_scale_strategy": _is_one_of(GradientScaleStrategy),
        "debug_graphviz_path": _is_text,
        "num_trainers": _is_positive,
        "trainer_id": _is_count,
        "trainers_endpoints": _is_names,
        "nccl_comm_num": _is_positive,
        "hierarchical_allreduce_inter_nranks": _is_count,
        "fuse_all_reduce_ops": _is_bool_or_none,
        "fuse_broadcast_ops": _is_bool_or_none,
        "memory_optimize": _is_bool_or_none,
        "memory_budget": is_budget,
        "mkldnn_enabled_op_types": lambda value: isinstance(value, dict | set | list),
    }
    _acting: ClassVar[frozenset[str]] = frozenset({
        *("gradient_scale_strategy", "sync_batch_norm", "debug_graphviz_path", "async_mode"),
        *("num_trainers", "trainer_id", "trainers_endpoints", "fuse_all_reduce_ops"),
        *("nccl_comm_num", "use_hierarchical_allreduce", "hierarchical_allreduce_inter_nranks"),
        "memory_budget",
    })  # fmt: skip
    _hints: ClassVar[frozenset[str]] = frozenset({
        *("enable_sequential_execution", "enable_backward_optimizer_op_deps"),
        *("remove_unnecessary_lock", "cache_runtime_context", "fuse_elewise_add_act_ops"),
        *("fuse_bn_act_ops", "enable_auto_fusion", "fuse_relu_depthwise_conv"),
        *("fuse_all_optimizer_ops", "fuse_broadcast_ops", "enable_inplace"),
        "mkldnn_enabled_op_types",
    })  # fmt: skip
    _reasons: ClassVar[Mapping[str, str]] = {
        "reduce_strategy": "Reduce is computed as AllReduce, whose results are the same",
        "memory_optimize": "XLA reuses memory by itself; set memory_budget for a program that fits",
        "is_distribution": "a program shows by itself whether it talks to parameter servers",
    }


class ExecutionStrategy(_Strategy):
    """How a program is run on several devices.

    Attributes:
        num_iteration_per_drop_scope: acts: the number of runs between drops of local scopes.
        num_iteration_per_run: warns: a run is one iteration, as with 1.8.5's own default executor.
        use_thread_barrier: a hint, like other fields on threads: XLA schedules the work of devices.
        _dry_run: acts: a run computes and changes nothing, and fetches only None.
    """

    _defaults: ClassVar[Mapping[str, Any]] = {
        "num_threads": 0,
        "use_cuda": True,
        "allow_op_delay": False,
        "num_iteration_per_drop_scope": 100,
        "num_iteration_per_run": 1,
        "use_thread_barrier": False,
        "use_experimental_executor": True,
        "_dry_run": False,
    }
    _checks: ClassVar[Mapping[str, Callable[[Any], bool]]] = {
        **dict.fromkeys(_defaults, _is_bool),
        "num_threads": _is_count,
        "num_iteration_per_drop_scope": _is_positive,
        "num_iteration_per_run": _is_positive,
    }
    _acting: ClassVar[frozenset[str]] = frozenset({"num_iteration_per_drop_scope", "_dry_run"})
    _hints: ClassVar[frozenset[str]] = frozenset({
        *("num_threads", "allow_op_delay", "use_thread_barrier", "use_experimental_executor"),
    })  # fmt: skip
    _reasons: ClassVar[Mapping[str, str]] = {
        "use_cuda": "the place of the Executor determines where a program runs",
        "num_iteration_per_run": "a run is one iteration, as it was with fluid's default executor",
    }
