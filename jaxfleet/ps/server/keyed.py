"""Takes keys and rows out of messages, which may hold anything."""

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.ps.messages import Message
from jaxfleet.ps.server.desk import RefusedError, text_of
from jaxfleet.ps.server.held import Held
from jaxfleet.ps.server.table import Table
from jaxfleet.tables.buckets import server_of
from jaxfleet.tables.eviction import no_scores
from jaxfleet.tables.numbers import FINITE, checked


def table_of(message: Message, held: Held) -> Table:
    """Returns the table that a message is about.

    Raises:
        RefusedError: there is none of that name here.
    """
    name = text_of(message, "table")
    table = held.tables.get(name)
    if table is None:
        known = ", ".join(held.tables) or "none"
        what = f"there is no table '{name}' on server {held.plan.server}, which has {known}"
        raise RefusedError("bad_message", what)
    return table


def keys_of(message: Message, held: Held) -> np.ndarray:
    """Returns a message's keys.

    Raises:
        RefusedError: there are none, or some are another server's.
    """
    keys, servers = _array(message, "keys"), len(held.plan.endpoints)
    if keys.dtype != np.int64 or keys.ndim != 1:
        what = f"{_about(message)}: keys are {keys.dtype}{list(keys.shape)}, not int64[n]"
        raise RefusedError("bad_message", what)
    if servers > 1:
        foreign = np.flatnonzero(server_of(keys, servers) != held.plan.server)
        if len(foreign):
            what = f"{_about(message)}: {len(foreign)} of {len(keys)} keys are other servers', "
            what += f"the first is {keys[foreign[0]]}"
            raise RefusedError("bad_message", what)
    return keys


def grads_of(message: Message, table: Table, keys: np.ndarray) -> np.ndarray:
    """Returns a message's gradients, a row for each key.

    Raises:
        RefusedError: there are none, they are not of this table, or they are not finite and the
            table refuses such.
    """
    grads, wanted = _array(message, "grads"), (len(keys), table.spec.dim)
    if grads.dtype != np.float32 or grads.shape != wanted:
        found = f"{grads.dtype}{list(grads.shape)}"
        what = f"{_about(message)}: gradients are {found}, not float32{list(wanted)}"
        raise RefusedError("bad_message", what)
    if table.spec.on_nan == "refuse":
        _check_finite(message, keys, grads)
    return grads


def _check_finite(message: Message, keys: np.ndarray, grads: np.ndarray) -> None:
    finite = np.isfinite(grads)
    if finite.all():
        return
    bad = np.flatnonzero(~finite.all(axis=1))
    what = f"{_about(message)}: the gradients of {len(bad)} of {len(keys)} keys are not finite, "
    what += f"the first is that of {keys[bad[0]]}; nothing was applied"
    hint = "look for a division by zero or a rate that is too high; on_nan='skip' leaves them out"
    raise RefusedError("refused", what, hint=hint)


def rate_of(message: Message) -> float | None:
    """Returns the learning rate that a push brings, None where it brings none.

    Raises:
        RefusedError: it is no number, or not finite.
    """
    rate = message.body.get("learning_rate")
    if rate is None:
        return None
    try:
        return checked(f"{_about(message)}: the learning rate", rate, FINITE)
    except ProgramError as error:
        raise RefusedError("bad_message", str(error)) from error


def scores_of(message: Message, table: Table, keys: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the shows and clicks that a push brings, by these names; one for each key.

    Raises:
        RefusedError: they are none, or the table keeps no scores.
    """
    found = {x.name: x.array for x in message.tensors if x.name in {"shows", "clicks"}}
    if found and not table.spec.has_scores:
        error = no_scores(table.spec.name)
        raise RefusedError("bad_message", str(error), hint="; ".join(error.__notes__))
    for name, counts in found.items():
        if counts.dtype != np.float32 or counts.shape != keys.shape:
            what = f"{name} are {counts.dtype}{list(counts.shape)}, not float32{list(keys.shape)}"
            raise RefusedError("bad_message", f"{_about(message)}: {what}")
        if not np.isfinite(counts).all():
            raise RefusedError("refused", f"{_about(message)}: some {name} are not finite")
    return found


def _array(message: Message, name: str) -> np.ndarray:
    for tensor in message.tensors:
        if tensor.name == name:
            return tensor.array
    raise RefusedError("bad_message", f"{_about(message)}: there are no {name}")


def _about(message: Message) -> str:
    """Says what a message is, for an error."""
    what = message.kind.value.replace("_", " ")
    return f"{what} of step {message.step}, table '{message.body.get('table')}'"
