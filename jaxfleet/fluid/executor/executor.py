"""Executor: runs programs over a scope."""

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxfleet.env import read_environment
from jaxfleet.errors import ClosedError, StrategyError
from jaxfleet.fluid.argument_checks import check_type
from jaxfleet.fluid.compiler.compiled_program import CompiledProgram
from jaxfleet.fluid.distribute_lookup_table import has_only_id_ops, run_ids
from jaxfleet.fluid.executor import fetching
from jaxfleet.fluid.executor.dataset_runs import DatasetRuns
from jaxfleet.fluid.executor.devices import (
    RankRunner,
    SingleDeviceRunner,
    device_count,
    join_ranks,
    names_ranks,
    rank_count,
    several_devices,
)
from jaxfleet.fluid.executor.fetching import (
    as_asked,
    as_list,
    as_tensors,
    kept_feed,
    names_fed,
    names_of,
    plain_names,
    prune_program,
    split_optimize_ops,
)
from jaxfleet.fluid.framework.operator import Operator
from jaxfleet.fluid.framework.program import KeyedCache, Program, VersionCache, default_main_program
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.lowering.feeding import fed_values, one_feed
from jaxfleet.fluid.lowering.lod_values import fetched_sequences, lengths_to_fetch
from jaxfleet.fluid.lowering.memory import MemoryBudget, refused_budget
from jaxfleet.fluid.lowering.program_cache import runnable
from jaxfleet.fluid.places import prepare_devices
from jaxfleet.fluid.pserver import PserverRuns, begins_rows, talks_to_others
from jaxfleet.fluid.reader import fed_by_readers
from jaxfleet.fluid.scope import Scope as FluidScope
from jaxfleet.fluid.scope import global_scope
from jaxfleet.runtime.scope import Scope


class Executor(DatasetRuns):
    """Runs programs on a place; JAX's default device, unless given.

    Examples:
        >>> import numpy as np
        >>> from jaxfleet import fluid
        >>> with fluid.program_guard(fluid.Program(), fluid.Program()):
        ...     x = fluid.data("x", [None, 2])
        ...     total = fluid.layers.reduce_sum(x)
        ...     exe = fluid.Executor(fluid.CPUPlace())
        ...     [value] = exe.run(feed={"x": np.ones((3, 2), "float32")}, fetch_list=[total])
        >>> float(value)
        6.0
    """

    def __init__(self, place: Any = None) -> None:
        prepare_devices()  # the last moment at which CPU_NUM may be set
        self.place = place
        self._local = SingleDeviceRunner(place)
        self._is_local = VersionCache(_is_local)
        self._pruned = KeyedCache[tuple[Any, ...], Program]()
        self._ranks = RankRunner()
        self._pserver = PserverRuns()
        self._entropy = int(np.random.SeedSequence().generate_state(1)[0])
        self._runs = 0
        self._closed = False
        self._only_dumps = read_environment().dump_until_compiled

    def run(
        self,
        program: Program | CompiledProgram | None = None,
        feed: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        fetch_list: Any = None,
        feed_var_name: str = "feed",
        fetch_var_name: str = "fetch",
        scope: Scope | None = None,
        return_numpy: bool = True,
        use_program_cache: bool = False,
        return_merged: bool = True,
        use_prune: bool = False,
    ) -> list[Any]:
        """Runs a program once; returns the fetched values, in order.

        Args:
            program: the default main program, unless given.
            feed: arrays by name; for several devices one dict to divide, or one for each.
            fetch_list: variables or their names. Optimizer operators in it, or the result of
                `minimize`, restrict the run to these of all optimizers' operators.
            feed_var_name: ignored; variables are fed directly.
            fetch_var_name: ignored, likewise.
            scope: the scope of persistable variables; the global one, unless given.
            return_numpy: return numpy arrays owned by the caller, of which one with a single
                element converts by `float()`; otherwise LoDTensors, without waiting.
            use_program_cache: ignored; compiled programs are always cached until they change.
            return_merged: concatenate the results of several devices along axis 0; otherwise return
                a list.
            use_prune: run only the operators that the fetch list needs.

        Raises:
            RuntimeError: the executor was closed.
            TypeError: the program, feed or fetch list is of the wrong type.
            FeedError: a fed or fetched value does not match the program.
            NonFiniteError: `FLAGS_check_nan_inf` is set, and an operator produced NaN or Inf.
            EndOfDataError: a loader of the program has no more batches.
        """
        if self._closed:
            what = "this Executor was closed, and runs nothing more"
            raise ClosedError(what, hint="make another")
        program = default_main_program() if program is None else program
        scope = global_scope() if scope is None else scope
        if self._only_dumps and (feed or fetch_list):
            self._only_dumps = False  # of the passes of this run, after which all is seen
            self.run(program, feed, fetch_list, scope=scope, use_prune=use_prune)
            raise SystemExit(0)
        names = None if use_prune else plain_names(fetch_list)
        if (
            names is not None
            and type(program) is Program
            and not program._readers
            and self._is_local.get(program)
            and not fetching.finite_check_enabled()
        ):
            # Fast path for the common step, whose every line costs time at every step.
            run, draw = self._local.run, self._next_run
            made = run(program, one_feed(feed), names, scope, draw, return_numpy=return_numpy)
            return made if return_numpy else list(as_tensors(made))
        return self._run_impl(
            program,
            feed,
            as_list(fetch_list),
            feed_var_name,
            fetch_var_name,
            scope,
            return_numpy,
            use_program_cache,
            return_merged,
            use_prune,
        )

    def _run_once(
        self, scope: Scope, program: Program, feed: dict[str, Any], fetch: Sequence[str]
    ) -> list[Any]:
        made = self.run(program, feed, list(fetch), scope=scope, return_numpy=False)
        return [tensor if tensor.lod() else tensor._array for tensor in made]

    def close(self) -> None:
        """Closes the executor and notifies the servers of its programs; a later run is an error."""
        self._pserver.close()
        self._local.clear()
        self._pruned.clear()
        self._ranks.clear()
        self._closed = True

    def _run_impl(
        self,
        program: Program | CompiledProgram | None,
        feed: Any,
        fetch_list: Any,
        feed_var_name: str,
        fetch_var_name: str,
        scope: Scope | None,
        return_numpy: bool,
        use_program_cache: bool,
        return_merged: bool,
        use_prune: bool = False,
    ) -> list[Any]:
        """Runs any kind of program; arguments as `run`."""
        program = default_main_program() if program is None else program
        scope = global_scope() if scope is None else scope
        check_type(program, "what an Executor runs", (Program, CompiledProgram))
        check_type(scope, "a scope", Scope)
        fetched, operators = self._split_optimize_ops_in_fetch_list(as_list(fetch_list))
        runs, feed = self._what_runs(program, feed, fetched, operators, scope, use_prune=use_prune)
        join_ranks(runs)
        if several_devices(program, runs, scope, self.place, self._ranks) is not None:
            given = (program, scope, feed, fetched, fetch_var_name, return_numpy, return_merged)
            return self._run_parallel(*given, runs=runs)
        budget = None
        if isinstance(program, CompiledProgram):
            if program._is_dry_run:
                return [None] * len(fetched)
            budget, scope = program._memory_budget, program._scope_of_state(scope)
        found = self._run_program(
            runs,
            feed,
            fetched,
            feed_var_name,
            fetch_var_name,
            scope,
            return_numpy,
            use_program_cache,
            budget=budget,
        )
        is_split = isinstance(program, CompiledProgram) and not return_merged
        return [[value] for value in found] if is_split else found

    def _run_parallel(
        self,
        program: Program | CompiledProgram,
        scope: Scope,
        feed: Any,
        fetch_list: Sequence[Variable | str],
        fetch_var_name: str,
        return_numpy: bool,
        return_merged: bool,
        *,
        runs: Program | None = None,
    ) -> list[Any]:
        """Runs a program on its devices, each on its part of the feed; arguments as `run`.

        `runs` is the part of the program to run, by default all of it. Raises StrategyError if the
        program runs on one device.
        """
        del fetch_var_name
        if runs is None:
            runs = program.program if isinstance(program, CompiledProgram) else program
        devices = several_devices(program, runs, scope, self.place, self._ranks)
        if devices is None:
            what = "the program runs on one device"
            raise StrategyError(what, hint="run it by Executor.run, or compile it for several")
        if isinstance(program, CompiledProgram):
            if program._is_dry_run:
                return [None] * len(fetch_list)
            scope = program._scope_of_state(scope)
        names = names_of(fetch_list)
        checked = fetching.checked_names(runs)
        made = devices.run(runs, feed, (*names, *checked), scope, self._next_run(runs))
        fetching.check_finite(runs, checked, made.values[len(names) :])
        made = made.first(len(names))
        values: list[Any] = made.merged() if return_merged else made.parts()
        return list(as_asked(values, return_numpy=return_numpy))

    def _run_inference(self, exe: Any, feed: Any) -> Any:
        """Runs an inference program by a given executor, an object with `run(feed)`."""
        return exe.run(feed)

    def _what_runs(
        self,
        program: Program | CompiledProgram,
        feed: Any,
        fetched: Sequence[Variable | str],
        operators: Sequence[Operator],
        scope: Scope,
        *,
        use_prune: bool,
    ) -> tuple[Program, Any]:
        """Returns the program to run for the arguments of `run`, and its feed."""
        runs = program.program if isinstance(program, CompiledProgram) else program
        if not runs.global_block().ops:
            warnings.warn("The program is empty: nothing runs", stacklevel=4)
        if runs._readers:
            feed = fed_by_readers(runs, feed, device_count(program, runs, scope, self.place))
        if use_prune or operators:
            key = (names_fed(feed), names_of(fetched), *map(id, operators))
            prune = partial(self._prune_program, program, feed, fetched, operators)
            runs = self._pruned.find(runs, key, prune)
            feed = self._update_feed(runs, feed)
        return runs, feed

    @classmethod
    def _split_optimize_ops_in_fetch_list(
        cls, fetch_list: Sequence[Any]
    ) -> tuple[list[Variable | str], list[Operator]]:
        return split_optimize_ops(fetch_list)

    @classmethod
    def _prune_program(
        cls,
        program: Program | CompiledProgram,
        feed: Any = None,
        fetch_list: Sequence[Any] | None = None,
        optimize_ops: Sequence[Operator] | None = None,
    ) -> Program:
        return prune_program(program, feed, fetch_list or (), optimize_ops or ())

    @classmethod
    def _update_feed(cls, program: Program | CompiledProgram, feed: Any) -> Any:
        return kept_feed(program, feed)

    def _run_program(
        self,
        program: Program | CompiledProgram | None,
        feed: Any,
        fetch_list: Any,
        feed_var_name: str,
        fetch_var_name: str,
        scope: Scope | None,
        return_numpy: bool,
        use_program_cache: bool,
        *,
        budget: MemoryBudget | None = None,
    ) -> list[Any]:
        """Runs a program on one device, or its part of a job of parameter servers.

        Arguments as `run`, with a memory `budget`; None for no limit. A CompiledProgram runs as the
        program from which it was made.
        """
        del feed_var_name, fetch_var_name, use_program_cache
        program = default_main_program() if program is None else program
        program = program.program if isinstance(program, CompiledProgram) else program
        scope = global_scope() if scope is None else scope
        given, fetch = one_feed(feed), names_of(as_list(fetch_list))
        if budget is not None and (talks_to_others(program) or has_only_id_ops(program)):
            raise refused_budget("a program that talks to servers, or runs on the host")
        if begins_rows(program):
            scope.rows.clear()
        if has_only_id_ops(program):
            made = run_ids(program, given, fetch, FluidScope.around(scope))
        else:
            checked = fetching.checked_names(program)
            names, talks = (*fetch, *checked), talks_to_others(program)
            if talks:
                made = self._run_with_servers(
                    program, given, names, scope, return_numpy=return_numpy
                )
            else:
                run = partial(self._local.run, return_numpy=return_numpy, budget=budget)
                made = run(program, given, names, scope, self._next_run)
            fetching.check_finite(program, checked, made[len(fetch) :])
            made = made[: len(fetch)]
            if return_numpy and not talks:
                return made
        return list(as_asked(made, return_numpy=return_numpy))

    def _run_with_servers(
        self,
        program: Program,
        feed: Mapping[str, Any],
        fetch: tuple[str, ...],
        scope: Scope,
        *,
        return_numpy: bool,
    ) -> list[Any]:
        fed = fed_values(program, feed, wide=self._pserver.ids_of_any_size(program))
        _put_persistables(program, fed, scope)
        draw = partial(self._next_run, program)
        lengths, asked = lengths_to_fetch(program, fetch), len(fetch)
        made = self._pserver.run(program, runnable, fed, fetch + lengths, scope, draw)
        fed |= dict(zip(lengths, made[asked:], strict=True))
        return fetched_sequences(program, fetch, made[:asked], fed, return_numpy=return_numpy)

    def _next_run(self, program: Program) -> np.uint32:
        """Returns the run number, a key of random operators."""
        start = program.random_seed or self._entropy
        self._runs += 1
        return np.uint32((start + self._runs - 1) % (1 << 32))


def _is_local(program: Program) -> bool:
    """Whether a program runs on one device and is not empty."""
    if rank_count(program) > 1 or names_ranks(program):
        return False
    if talks_to_others(program) or begins_rows(program):
        return False
    if has_only_id_ops(program):
        return False
    return bool(program.global_block().ops)


def _put_persistables(program: Program, fed: dict[str, Any], scope: Scope) -> None:
    """Moves fed persistable variables into the scope, from which a run reads them."""
    declared = program.global_block().vars
    for name in [name for name in fed if name in declared and declared[name].persistable]:
        scope.keep({name: jax.numpy.array(fed.pop(name), copy=True)})
