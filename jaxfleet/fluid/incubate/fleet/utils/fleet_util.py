"""FleetUtil: metrics over all workers of a fleet, and output of the first one.

Only fluid's metrics are provided, not its functions for donefiles and models of a cluster.
"""

import sys
from typing import Any

import numpy as np

from jaxfleet.fluid.argument_checks import mistake
from jaxfleet.fluid.incubate.fleet.base.fleet_base import Fleet
from jaxfleet.fluid.incubate.fleet.parameter_server import distribute_transpiler, pslib
from jaxfleet.fluid.metrics import area
from jaxfleet.fluid.scope import global_scope
from jaxfleet.runtime.scope import Scope

_POS, _NEG = "_generated_var_2", "_generated_var_3"


class FleetUtil:
    """Metrics of a fleet: the default one of `mode`, `pslib` or `transpiler`, unless given.

    Raises:
        ValueError: there is no such mode.
    """

    def __init__(self, mode: str = "pslib", fleet: Fleet | None = None) -> None:
        fleets: dict[str, Fleet] = {"pslib": pslib.fleet, "transpiler": distribute_transpiler.fleet}
        if mode not in fleets:
            what = 'Please choose one mode from ["pslib", "transpiler"]'
            raise mistake(what, f"not {mode!r}")
        self._fleet = fleets[mode] if fleet is None else fleet

    def rank0_print(self, s: str) -> None:
        """Prints a line on the first worker."""
        if self._fleet.is_first_worker():
            print(s, flush=True)  # noqa: T201  # requested

    rank0_info = rank0_print

    def rank0_error(self, s: str) -> None:
        """Writes a line to the first worker's standard error."""
        if self._fleet.is_first_worker():
            sys.stderr.write(f"{s}\n")

    def set_zero(
        self,
        var_name: str,
        scope: Scope | None = None,
        place: Any = None,
        param_type: str = "int64",
    ) -> None:
        """Sets a variable to zeros, such as a metric's counts at the end of a pass.

        It keeps its device and dtype, whatever `place` and `param_type` are.

        Raises:
            ValueError: the scope, the global one unless given, has no such variable.
        """
        del place, param_type
        held = global_scope() if scope is None else scope
        held.keep({var_name: np.zeros_like(_counts(held, var_name))})

    def get_global_auc(
        self, scope: Scope | None = None, stat_pos: str = _POS, stat_neg: str = _NEG
    ) -> float:
        """Returns the area under the curve over the samples of all workers, which must all call it.

        `stat_pos` and `stat_neg` are the variables with counts of positive and negative samples by
        bucket, of `layers.auc`, in the global scope unless one is given.

        Raises:
            ValueError: the scope has no such variable.
        """
        held = global_scope() if scope is None else scope
        return area(self._summed(held, stat_pos), self._summed(held, stat_neg))

    def print_global_auc(
        self,
        scope: Scope | None = None,
        stat_pos: str = _POS,
        stat_neg: str = _NEG,
        print_prefix: str = "",
    ) -> None:
        """Prints the result of `get_global_auc` on the first worker."""
        found = self.get_global_auc(scope, stat_pos, stat_neg)
        self.rank0_print(f"{print_prefix} global auc = {found}")

    def _summed(self, scope: Scope, name: str) -> np.ndarray:
        """Sums a variable over all workers."""
        mine = _counts(scope, name).astype(np.int64).reshape(-1)
        total = np.zeros_like(mine)
        self._fleet.all_reduce_worker(mine, total)
        return total


def _counts(scope: Scope, name: str) -> np.ndarray:
    if name not in scope:
        what = f"'{name}' is not in the scope, and should count a metric's samples"
        raise mistake(what, "name the variables that layers.auc returns")
    return np.asarray(scope.peek(name))
