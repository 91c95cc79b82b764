"""ParallelExecutor: the older interface for running a program on all devices."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from jaxfleet.errors import AssertedError
from jaxfleet.fluid.argument_checks import mistake
from jaxfleet.fluid.compiler.compiled_program import CompiledProgram
from jaxfleet.fluid.compiler.strategies import BuildStrategy, ExecutionStrategy
from jaxfleet.fluid.executor.executor import Executor
from jaxfleet.fluid.framework.program import Program, default_main_program
from jaxfleet.fluid.places import CPUPlace, CUDAPlace, default_places
from jaxfleet.fluid.scope import global_scope
from jaxfleet.runtime.scope import Scope


class ParallelExecutor:
    """Runs a program on all devices, each on its part of the feed.

    Args:
        use_cuda: run on GPUs; on the CPU, with a warning, if there are none.
        loss_name: the loss; required if there are gradients.
        main_program: the program to run; the default main program, unless given.
        share_vars_from: another one that has run, whose parameters are used.
        exec_strategy: how the program is run.
        build_strategy: how the program is rewritten.
        num_trainers: the number of processes that train together.
        trainer_id: the number of this process among them.
        scope: the scope of the state; the global scope, unless given.

    Raises:
        AssertionError: `share_vars_from` is not a ParallelExecutor, or there is no loss.
        ValueError: `share_vars_from` has not run.
    """

    def __init__(
        self,
        use_cuda: bool,
        loss_name: str | None = None,
        main_program: Program | None = None,
        share_vars_from: "ParallelExecutor | None" = None,
        exec_strategy: ExecutionStrategy | None = None,
        build_strategy: BuildStrategy | None = None,
        num_trainers: int = 1,
        trainer_id: int = 0,
        scope: Scope | None = None,
    ) -> None:
        if share_vars_from is not None and not isinstance(share_vars_from, ParallelExecutor):
            what = f"variables are shared from a {type(share_vars_from).__name__}"
            raise mistake(what, "give the ParallelExecutor that has run", AssertedError)
        given = build_strategy if build_strategy is not None else BuildStrategy()
        build = given.for_trainer(num_trainers, trainer_id)
        self._scope = scope if scope is not None else global_scope()
        self._place = CUDAPlace(0) if use_cuda else CPUPlace()
        program = main_program if main_program is not None else default_main_program()
        self._compiled: CompiledProgram = CompiledProgram(program).with_data_parallel(
            loss_name=loss_name,
            build_strategy=build,
            exec_strategy=exec_strategy,
            share_vars_from=share_vars_from._compiled if share_vars_from is not None else None,
            places=default_places(use_cuda=use_cuda),
        )
        self._compiled._compile(self._scope, self._place)
        given.finalize()
        self._executor = Executor(self._place)

    def run(
        self,
        fetch_list: Any,
        feed: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        feed_dict: Mapping[str, Any] | None = None,
        return_numpy: bool = True,
    ) -> list[Any]:
        """Runs the program once; returns the fetched values of all devices, joined along axis 0.

        The rows of arrays in `feed`, or by its older name `feed_dict`, are divided equally, with
        the remainder on the last device; or it is a list with a dict for each device.

        Raises:
            FeedError: a fed or fetched value does not match the program.
        """
        if feed_dict is not None:
            text = "feed_dict is the old name of feed"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            if feed is not None:
                raise mistake("feed and feed_dict are both given", "give feed alone")
            feed = feed_dict
        return self._executor.run(
            self._compiled,
            feed=feed,
            fetch_list=fetch_list,
            scope=self._scope,
            return_numpy=return_numpy,
        )

    @property
    def device_count(self) -> int:
        """The number of devices on which the program runs."""
        return len(self._replicas.places)

    def drop_local_exe_scopes(self) -> None:
        """Only resets the record of runs: XLA frees their memory by itself."""
        self._replicas.has_local_scopes = False

    def _need_create_local_exe_scopes(self) -> bool:
        return not self._replicas.has_local_scopes

    @property
    def _replicas(self) -> Any:
        found = self._compiled._replicas
        assert found is not None
        return found
