"""ParallelExecutor: a program on all devices, under one name; the older spelling."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from jaxfleet.errors import AssertedError
from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.compiler.compiled_program import CompiledProgram
from jaxfleet.fluid.compiler.strategies import BuildStrategy, ExecutionStrategy
from jaxfleet.fluid.executor.core import Executor
from jaxfleet.fluid.places import CPUPlace, CUDAPlace, default_places
from jaxfleet.fluid.program import Program, default_main_program
from jaxfleet.fluid.scope import global_scope
from jaxfleet.runtime.scope import Scope


class ParallelExecutor:
    """Runs a program on all devices, each on its part of what is fed.

    Args:
        use_cuda: run on GPUs; where there are none, on the CPU, with a warning.
        loss_name: the loss; needed where there are gradients.
        main_program: what runs; the default main program, unless given.
        share_vars_from: another one whose parameters to use: it has run before.
        exec_strategy: how the program is run.
        build_strategy: how the program is rewritten.
        num_trainers: how many processes train together.
        trainer_id: which of them this is.
        scope: where the state is; the global scope, unless given.

    Raises:
        AssertionError: what is shared from is no ParallelExecutor, or there is no loss.
        ValueError: what is shared from has not run.
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
        """Runs the program once; returns what is fetched, all devices' joined along axis 0.

        Args:
            fetch_list: variables or their names.
            feed: arrays by name, whose rows the devices share: each gets as many, and the last
                those that are left over too. Or a list with a dict for each device.
            feed_dict: what `feed` was called once.
            return_numpy: return numpy arrays; JAX's if not.

        Raises:
            FeedError: what is fed or fetched does not fit.
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
        """How many devices the program runs on."""
        return len(self._replicas.places)

    def drop_local_exe_scopes(self) -> None:
        """Lets go what runs have left: nothing but the note that they have, since XLA does."""
        self._replicas.has_local_scopes = False

    def _need_create_local_exe_scopes(self) -> bool:
        return not self._replicas.has_local_scopes

    @property
    def _replicas(self) -> Any:
        found = self._compiled._replicas
        assert found is not None
        return found
