"""Programs cut down to what is fetched, once for each thing asked of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from jaxfleet.fluid.compiler.compiled_program import CompiledProgram, warn_of_no_program
from jaxfleet.fluid.executor.fetching import Fetched, names_of
from jaxfleet.fluid.operator import ROLE, Operator
from jaxfleet.fluid.program import Program
from jaxfleet.fluid.pruning import lying_in
from jaxfleet.fluid.roles import OpRole
from jaxfleet.fluid.versions import PerVersion

Prune: TypeAlias = Callable[[Program | CompiledProgram, Any, Any, Any], Program]
_Key: TypeAlias = tuple[tuple[str, ...], tuple[str, ...], tuple[int, ...]]


class PrunedPrograms:
    """Keeps pruned programs as long as what they are pruned from lives and stays what it is."""

    def __init__(self) -> None:
        self._known: PerVersion[dict[_Key, Program]] = PerVersion(lambda _: {})

    def find(
        self,
        program: Program | CompiledProgram,
        feed: Any,
        fetched: Sequence[Fetched],
        operators: Sequence[Operator],
        prune: Prune,
    ) -> Program:
        """Returns what a program is pruned to, by a call if it is not known."""
        whole = program.program if isinstance(program, CompiledProgram) else program
        known = self._known.get(whole)
        key = (_names_fed(feed), names_of(fetched), tuple(map(id, operators)))
        if key not in known:
            known[key] = prune(program, feed, fetched, operators)
        return known[key]

    def clear(self) -> None:
        """Lets all of them go."""
        self._known.clear()


def prune_program(
    program: Program | CompiledProgram,
    feed: Any,
    fetch_list: Sequence[Fetched],
    optimize_ops: Sequence[Operator],
) -> Program:
    """Returns a copy of a program with what makes the values that are fetched.

    Args:
        program: it; one that is compiled from a graph stays whole, with a warning.
        feed: what is fed is not computed.
        fetch_list: what is wanted.
        optimize_ops: the updates to keep; all of the program's, if none is named.
    """
    whole = program.program if isinstance(program, CompiledProgram) else program
    if isinstance(program, CompiledProgram) and program._program is None:
        warn_of_no_program()
        return whole
    root = whole.global_block()
    kept = list(optimize_ops) or [op for op in root.ops if op._is_optimize_op()]
    # Others wait for what a trainer sends, whatever it fetches.
    kept += [op for op in root.ops if op.attrs.get(ROLE, 0) & (OpRole.RPC | OpRole.DIST)]
    made = {name for op in root.ops for name in op.output_arg_names}
    # What nothing makes is read from the scope, so it needs no operator.
    names = names_of(fetch_list)
    lie = lying_in(whole, names)
    wanted = [name for name, where in zip(names, lie, strict=True) if where in made]
    return whole._prune_with_input(list(_names_fed(feed)), [*wanted, *kept])


def kept_feed(program: Program | CompiledProgram, feed: Any) -> Any:
    """Returns what of a feed a pruned program still has."""
    runs = program.program if isinstance(program, CompiledProgram) else program
    declared = runs.global_block().vars
    if isinstance(feed, Mapping):
        return {name: value for name, value in feed.items() if name in declared}
    if isinstance(feed, list | tuple):
        return [kept_feed(runs, one) for one in feed]
    return feed


def _names_fed(feed: Any) -> tuple[str, ...]:
    feeds = [feed] if isinstance(feed, Mapping) else feed or ()
    return tuple(dict.fromkeys(name for one in feeds for name in one))
