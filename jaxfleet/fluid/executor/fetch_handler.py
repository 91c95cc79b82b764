"""What a run over a dataset shows: values every so many batches, or every so many seconds."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxfleet.errors import AssertedError
from jaxfleet.fluid.checks import check_type, mistake
from jaxfleet.fluid.executor.fetching import names_of
from jaxfleet.fluid.variable import Variable


class FetchHandler:
    """Is given values while a dataset is gone through; scripts derive a class of their own.

    Args:
        var_dict: variables by the names that they are given under.
        period_secs: after how many seconds.

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
        """Takes values by name; prints the first of each unless a script's class does otherwise."""
        for name, value in res_dict.items():
            if value is not None:
                print(f"{name}[0]: {np.asarray(value).reshape(-1)[0]} ")  # noqa: T201  # asked for

    @staticmethod
    def help() -> None:
        """Prints how to derive a class."""
        print(_HELP)  # noqa: T201  # asked for


_HELP = """
class Shown(fluid.FetchHandler):
    def handler(self, res_dict):
        print(res_dict["auc"])

exe.train_from_dataset(main, dataset, fetch_handler=Shown({"auc": auc}, period_secs=10))
"""


@dataclass
class Shown:
    """What is shown of a run.

    Attributes:
        names: what is printed.
        titles: what stands before each.
        period: after how many batches.
        handler: is given values by time.
        debug: print every batch.
        last: when the handler was given values.
    """

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
    ) -> "Shown":
        """Checks what a script asks for.

        Raises:
            AssertionError: there are not as many titles as variables.
            ProgramError: the period is none.
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
        """What is fetched with every batch, and stays on the device until it is shown."""
        handled = [v.name for v in self.handler.var_dict.values()] if self.handler else []
        return [*self.names, *handled]

    def show(self, batch: int, values: Sequence[Any], seconds: float) -> None:
        """Shows a batch's values where it is time.

        Args:
            batch: its number, from 0.
            values: those of `fetch`.
            seconds: that it took.
        """
        if self.debug:
            print(f"batch {batch}: {seconds:.6f} s")  # noqa: T201  # asked for
        if self.names and batch % self.period == 0:
            said = zip(self.titles, values[: len(self.names)], strict=True)
            text = ", ".join(f"{title}: {_text(value)}" for title, value in said)
            print(f"batch {batch}: {text}")  # noqa: T201  # asked for
        if self.handler is not None and time.monotonic() - self.last >= self.handler.period_secs:
            self.last = time.monotonic()
            arrays = map(np.asarray, values[len(self.names) :])
            self.handler.handler(dict(zip(self.handler.var_dict, arrays, strict=True)))


def _text(value: Any) -> str:
    return np.array2string(np.asarray(value), precision=8, separator=", ", threshold=20)
