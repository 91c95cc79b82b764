"""Runs `split_ids` and `merge_ids` by themselves, on the host: how many ids there are, they decide.

Servers of a distributed table were given ids by their remainder; in a job of ours `jaxfleet.tables`
divides them, and these operators say what to look up. A script that runs them gets what they say.
"""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from jaxfleet.errors import FeedError
from jaxfleet.fluid.operator import Operator
from jaxfleet.fluid.program import Program
from jaxfleet.fluid.scope import Scope

_OPS = frozenset({"split_ids", "merge_ids"})


def is_of_ids(program: Program) -> bool:
    """Tells whether a program does nothing but divide ids and bring rows together."""
    ops = program.global_block().ops
    return bool(ops) and all(op.type in _OPS for op in ops)


def run_ids(
    program: Program, fed: Mapping[str, np.ndarray], fetch: Sequence[str], scope: Scope
) -> list[np.ndarray]:
    """Runs such a program; returns what is fetched, and leaves all that it makes in the scope.

    Raises:
        FeedError: something is neither fed nor in the scope, or nothing makes what is fetched.
    """
    values = dict(fed)
    for op in program.global_block().ops:
        if op.type == "split_ids" and op.input("Ids")[0] in scope.selected_rows:
            _split_rows(op, scope)
            continue
        read = [_value(name, values, scope) for name in op.input("Ids")]
        if op.type == "split_ids":
            made = split_ids(read, len(op.output("Out")))
        else:
            rows, x = ([_value(n, values, scope) for n in op.input(s)] for s in ("Rows", "X"))
            made = merge_ids(read, rows, x)
        values.update(zip(op.output("Out"), made, strict=True))
    scope.keep({name: jnp.asarray(array) for name, array in values.items() if name not in fed})
    return [_value(name, values, scope) for name in fetch]


def split_ids(ids: Sequence[np.ndarray], count: int) -> list[np.ndarray]:
    """Returns all ids, each once and in order, by their remainders: `[n, 1]` for each."""
    found = np.unique(np.concatenate([array.reshape(-1) for array in ids]))
    return [found[found % count == remainder][:, None] for remainder in range(count)]


def merge_ids(
    ids: Sequence[np.ndarray], rows: Sequence[np.ndarray], values: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Returns for each array of ids what `values` has for them: `[n, ...]`.

    Args:
        ids: in any order, maybe several times.
        rows: the ids that each array of values is of.
        values: a row for each of those.

    Raises:
        FeedError: an id has no row.
    """
    known = np.concatenate([array.reshape(-1) for array in rows])
    whole, order = np.concatenate(list(values)), np.argsort(known, kind="stable")
    made = []
    for wanted in (array.reshape(-1) for array in ids):
        places = np.minimum(np.searchsorted(known[order], wanted), len(known) - 1)
        at = order[places]
        if len(missing := wanted[known[at] != wanted]):
            raise FeedError(f"merge_ids: no row came for id {missing[0]}", hint="give all rows")
        made.append(whole[at])
    return made


def _split_rows(op: Operator, scope: Scope) -> None:
    """Divides rows by the remainders of their numbers, in the order in which they are."""
    given = scope.selected_rows[op.input("Ids")[0]]
    rows, values, names = np.asarray(given.rows(), np.int64), given.value(), op.output("Out")
    for remainder, name in enumerate(names):
        mine = rows % len(names) == remainder
        made = scope.var(name).get_selected_rows()
        made.set_rows(rows[mine].tolist())
        made.set_height(given.height())
        made.get_tensor().set(values[mine])


def _value(name: str, values: Mapping[str, np.ndarray], scope: Scope) -> np.ndarray:
    if name in values:
        return np.asarray(values[name])
    if name in scope:
        return np.asarray(scope.peek(name))
    raise FeedError(f"'{name}' is neither fed nor in the scope", hint="feed it by its name")
