"""Goes through a dataset with a program: a step a batch, while threads read the next ones."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from jaxfleet.errors import DatasetError, UnsupportedError
from jaxfleet.fluid.checks import check_type, mistake
from jaxfleet.fluid.compiler.compiled_program import CompiledProgram
from jaxfleet.fluid.copying import copied, without_backward
from jaxfleet.fluid.dataset import DatasetBase
from jaxfleet.fluid.distributed.worker import Run, Worker
from jaxfleet.fluid.executor.fetch_handler import FetchHandler, Shown
from jaxfleet.fluid.program import Program, default_main_program
from jaxfleet.fluid.scope import global_scope
from jaxfleet.fluid.versions import PerVersion
from jaxfleet.runtime.scope import Scope


class DatasetRuns(ABC):
    """What an Executor does with a dataset.

    Attributes:
        place: where it runs.
    """

    place: Any

    def train_from_dataset(
        self,
        program: Program | CompiledProgram | None = None,
        dataset: DatasetBase | None = None,
        scope: Scope | None = None,
        thread: int = 0,
        debug: bool = False,
        fetch_list: Sequence[Any] | None = None,
        fetch_info: Sequence[str] | None = None,
        print_period: int = 100,
        fetch_handler: FetchHandler | None = None,
    ) -> None:
        """Trains a program on all batches of a dataset, whose files threads read ahead.

        A program that `DownpourSGD` or pslib's optimizer described looks up its rows in the job's
        tables, and pushes gradients to them. Steps are one after another, whatever `thread` says:
        fluid's threads train side by side on one set of parameters, and end elsewhere each time.

        Args:
            program: the default main program, unless given.
            dataset: from `fluid.DatasetFactory().create_dataset(...)`.
            scope: where variables live that outlive a step; the global one, unless given.
            thread: how many files are read at once, where the dataset says more; 0 for its own.
            debug: print every batch, with its seconds.
            fetch_list: variables whose values are printed.
            fetch_info: what is printed before each; its name unless given.
            print_period: after how many batches.
            fetch_handler: is given values every so many seconds.

        Raises:
            RuntimeError: there is no dataset, or the executor was closed.
            AssertionError: there are not as many `fetch_info` as fetched variables.
            FeedError: a file cannot be read, or a line does not fit.
        """
        shown = Shown.of(fetch_list, fetch_info, print_period, fetch_handler, debug=debug)
        self._run_dataset(program, dataset, scope, thread, shown, train=True)

    def infer_from_dataset(
        self,
        program: Program | CompiledProgram | None = None,
        dataset: DatasetBase | None = None,
        scope: Scope | None = None,
        thread: int = 0,
        debug: bool = False,
        fetch_list: Sequence[Any] | None = None,
        fetch_info: Sequence[str] | None = None,
        print_period: int = 100,
        fetch_handler: FetchHandler | None = None,
    ) -> None:
        """Runs a program on a dataset as `train_from_dataset`, without gradients and updates."""
        shown = Shown.of(fetch_list, fetch_info, print_period, fetch_handler, debug=debug)
        self._run_dataset(program, dataset, scope, thread, shown, train=False)

    def _run_dataset(
        self,
        program: Program | CompiledProgram | None,
        dataset: DatasetBase | None,
        scope: Scope | None,
        thread: int,
        shown: Shown,
        *,
        train: bool,
    ) -> None:
        home = global_scope() if scope is None else scope
        given = default_main_program() if program is None else program
        runs = _on_one_device(given, home, self.place)
        _run(partial(self._run_once, home), runs, dataset, home, thread, shown, train=train)

    @abstractmethod
    def _run_once(
        self, scope: Scope, program: Program, feed: dict[str, Any], fetch: Sequence[str]
    ) -> list[Any]:
        """Runs a program once; returns what is fetched, as it lies on the device."""


class _Steps(Protocol):
    """Does what a batch is for."""

    def step(self, feed: Mapping[str, Any], fetch: list[str]) -> list[Any]: ...

    def close(self) -> None: ...


_INFERRED = PerVersion(lambda program: without_backward(copied(program)))


class _Plain:
    """Runs a program as it is: its optimizer's operators are in it."""

    def __init__(self, program: Program, run: Run, *, is_trained: bool) -> None:
        self._program = program if is_trained else _INFERRED.get(program)
        self._run = run

    def step(self, feed: Mapping[str, Any], fetch: list[str]) -> list[Any]:
        return self._run(self._program, dict(feed), fetch)

    def close(self) -> None:
        pass


def _on_one_device(program: Program | CompiledProgram, scope: Scope, place: Any) -> Program:
    """Returns the program that a dataset feeds.

    Raises:
        NotImplementedError: it was compiled for several devices.
    """
    check_type(program, "what an Executor trains", (Program, CompiledProgram))
    if not isinstance(program, CompiledProgram):
        return program
    program._compile(scope, place)
    if program._replicas is not None and not program._replicas.is_one:
        what = "a dataset feeds programs on one device, and this one was compiled for several"
        raise UnsupportedError(what, hint="train the Program itself")
    return program.program


def _run(
    run: Run,
    program: Program,
    dataset: DatasetBase | None,
    scope: Scope,
    thread: int,
    shown: Shown,
    *,
    train: bool,
) -> None:
    """Runs a program on every batch.

    Args:
        run: runs a program once.
        program: it.
        dataset: where batches are from.
        scope: where state is.
        thread: how many files are read at once, where the dataset says more.
        shown: what is shown of it.
        train: also backward and updates.

    Raises:
        RuntimeError: there is no dataset, or nothing says how many threads read it.
    """
    if dataset is None:
        raise mistake("dataset is need and should be initialized", _MAKE, kind=DatasetError)
    check_type(dataset, "a dataset", DatasetBase, _MAKE)
    threads = min(thread, dataset.thread_num or thread) if thread > 0 else dataset.thread_num
    if threads <= 0:
        what = (
            "You should set thread num first, either in Dataset or in Executor.train_from_dataset"
        )
        raise mistake(what, "dataset.set_thread(1)", kind=DatasetError)
    does = _steps(run, program, scope, train=train)
    batches = dataset.batches(threads)
    try:
        for number, feed in enumerate(batches):
            begin = time.perf_counter()
            values = does.step(feed, shown.fetch)
            shown.show(number, values, time.perf_counter() - begin)
    finally:
        batches.close()
    does.close()


_MAKE = "fluid.DatasetFactory().create_dataset('QueueDataset')"


def _steps(run: Run, program: Program, scope: Scope, *, train: bool) -> _Steps:
    if (program._fleet_opt or {}).get("fleet_desc") is not None:
        return Worker(program, scope, run, is_trained=train)
    return _Plain(program, run, is_trained=train)
