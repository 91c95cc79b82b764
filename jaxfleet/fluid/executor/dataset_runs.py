"""Runs over a dataset: one step a batch, fetch handlers, and registered runners."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np

from jaxfleet.errors import AssertedError, DatasetError, UnsupportedError
from jaxfleet.fluid.argument_checks import check_type, mistake
from jaxfleet.fluid.compiler.compiled_program import CompiledProgram
from jaxfleet.fluid.dataset import DatasetBase
from jaxfleet.fluid.executor.fetching import names_of
from jaxfleet.fluid.framework.program import Program, VersionCache, default_main_program
from jaxfleet.fluid.framework.program_copy import copy_program, without_backward
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.scope import global_scope
from jaxfleet.runtime.scope import Scope


class FetchHandler:
    """Receives values during a pass over a dataset; scripts derive their own class.

    `var_dict` has the variables by the names passed to the handler.

    Raises:
        AssertionError: there are no variables.
    """

    def __init__(
        self, var_dict: Mapping[str, Variable] | None = None, period_secs: float = 60
    ) -> None:
        check_type(var_dict, "var_dict", (Mapping, type(None)))
        if var_dict is None:
            what = "a FetchHandler is given no variables"
            raise mistake(what, "var_dict={'auc': auc}", AssertedError)
        self.var_dict, self.period_secs = dict(var_dict), period_secs

    def handler(self, res_dict: Mapping[str, np.ndarray]) -> None:
        """Handles values by name; by default prints the first element of each."""
        for name, value in res_dict.items():
            if value is not None:
                print(f"{name}[0]: {np.asarray(value).reshape(-1)[0]} ")  # noqa: T201  # requested

    @staticmethod
    def help() -> None:
        """Prints how to derive a class."""
        print(_HELP)  # noqa: T201  # requested


_HELP = """
class Shown(fluid.FetchHandler):
    def handler(self, res_dict):
        print(res_dict["auc"])

exe.train_from_dataset(main, dataset, fetch_handler=Shown({"auc": auc}, period_secs=10))
"""


@dataclass
class FetchPrinter:
    """Prints fetched values every `period` batches, and passes them to a handler by time."""

    names: list[str]
    titles: list[str]
    period: int
    handler: FetchHandler | None
    debug: bool
    last: float = field(default_factory=time.monotonic)

    @classmethod
    def of(
        cls,
        fetch_list: Sequence[Any] | None,
        fetch_info: Sequence[str] | None,
        period: int,
        handler: FetchHandler | None,
        *,
        debug: bool,
    ) -> "FetchPrinter":
        """Checks the arguments of a script.

        Raises:
            AssertionError: the number of titles differs from that of variables.
            ProgramError: the period is invalid.
        """
        names = names_of(list(fetch_list or ()))
        titles = list(fetch_info) if fetch_info is not None else list(names)
        if len(titles) != len(names):
            what = f"fetch_info has {len(titles)} texts, and fetch_list {len(names)} variables"
            raise mistake(what, "one for each, or none at all", AssertedError)
        if not isinstance(period, int) or period < 1:
            raise mistake(f"print_period is {period!r}", "after how many batches: 1 or more")
        check_type(handler, "fetch_handler", (FetchHandler, type(None)))
        return cls(list(names), titles, period, handler, debug)

    @property
    def fetch(self) -> list[str]:
        """Names fetched with every batch; their values stay on the device until they are shown."""
        handled = [v.name for v in self.handler.var_dict.values()] if self.handler else []
        return [*self.names, *handled]

    def show(self, batch: int, values: Sequence[Any], seconds: float) -> None:
        """Shows the values of a batch when due; `seconds` is the duration of its step."""
        if self.debug:
            print(f"batch {batch}: {seconds:.6f} s")  # noqa: T201  # requested
        if self.names and batch % self.period == 0:
            said = zip(self.titles, values[: len(self.names)], strict=True)
            text = ", ".join(f"{title}: {_text(value)}" for title, value in said)
            print(f"batch {batch}: {text}")  # noqa: T201  # requested
        if self.handler is not None and time.monotonic() - self.last >= self.handler.period_secs:
            self.last = time.monotonic()
            arrays = map(np.asarray, values[len(self.names) :])
            self.handler.handler(dict(zip(self.handler.var_dict, arrays, strict=True)))


def _text(value: Any) -> str:
    return np.array2string(np.asarray(value), precision=8, separator=", ", threshold=20)


class DatasetRuns(ABC):
    """The dataset methods of an Executor."""

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
        tables, and pushes gradients to them. Steps run one after another, whatever `thread` is:
        fluid's threads train concurrently on one set of parameters, with nondeterministic results.

        Args:
            program: the default main program, unless given.
            dataset: from `fluid.DatasetFactory().create_dataset(...)`.
            scope: the scope of persistable variables; the global one, unless given.
            thread: the number of files read at once, if below the dataset's own; 0 for its own.
            debug: print every batch, with its seconds.
            fetch_list: variables whose values are printed.
            fetch_info: the text printed before each; its name unless given.
            print_period: the number of batches between prints.
            fetch_handler: receives values at its interval in seconds.

        Raises:
            RuntimeError: there is no dataset, or the executor was closed.
            AssertionError: the number of `fetch_info` differs from that of fetched variables.
            FeedError: a file cannot be read, or a line does not match the program.
        """
        shown = FetchPrinter.of(fetch_list, fetch_info, print_period, fetch_handler, debug=debug)
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
        """Runs a program on a dataset like `train_from_dataset`, without gradients and updates."""
        shown = FetchPrinter.of(fetch_list, fetch_info, print_period, fetch_handler, debug=debug)
        self._run_dataset(program, dataset, scope, thread, shown, train=False)

    def _run_dataset(
        self,
        program: Program | CompiledProgram | None,
        dataset: DatasetBase | None,
        scope: Scope | None,
        thread: int,
        shown: FetchPrinter,
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
        """Runs a program once; returns the fetched device arrays."""


# Runs a program on a feed and returns the fetched values.
Run: TypeAlias = Callable[[Program, dict[str, Any], list[str]], list[Any]]


class BatchRunner(Protocol):
    """Runs a program on one batch after another."""

    def step(self, feed: Mapping[str, Any], fetch: list[str]) -> list[Any]: ...

    def close(self) -> None: ...


class MakeRunner(Protocol):
    """Makes a `BatchRunner`, such as `Worker` of `jaxfleet.contrib.downpour`."""

    def __call__(
        self, program: Program, scope: Scope, run: Run, /, *, is_trained: bool
    ) -> BatchRunner: ...


_RUNNERS: dict[str, MakeRunner] = {}  # by the key of `_fleet_opt`


def register_runner(key: str, make: MakeRunner) -> None:
    """Registers a runner for programs whose `_fleet_opt` has a key.

    Called by packages above fluid, which an Executor cannot import.
    """
    _RUNNERS[key] = make


_INFERRED = VersionCache(lambda program: without_backward(copy_program(program)))


class _PlainWorker:
    """Runs a program unchanged; it contains its optimizer's operators."""

    def __init__(self, program: Program, run: Run, *, is_trained: bool) -> None:
        self._program = program if is_trained else _INFERRED.get(program)
        self._run = run

    def step(self, feed: Mapping[str, Any], fetch: list[str]) -> list[Any]:
        return self._run(self._program, dict(feed), fetch)

    def close(self) -> None:
        pass


def _on_one_device(program: Program | CompiledProgram, scope: Scope, place: Any) -> Program:
    """Returns the program that a dataset feeds; NotImplementedError for several devices."""
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
    shown: FetchPrinter,
    *,
    train: bool,
) -> None:
    """Runs a program on every batch of a dataset.

    Raises RuntimeError if there is no dataset, or the number of its reader threads is not set.
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


def _steps(run: Run, program: Program, scope: Scope, *, train: bool) -> BatchRunner:
    for key, make in _RUNNERS.items():
        if (program._fleet_opt or {}).get(key) is not None:
            return make(program, scope, run, is_trained=train)
    return _PlainWorker(program, run, is_trained=train)
