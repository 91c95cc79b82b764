"""Checks of a step's arguments against its example, and their placement on devices."""

import dataclasses
import hashlib
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfleet.capture import Captured
from jaxfleet.capture.signature import OTHER_ATTRIBUTE, Leaf, difference
from jaxfleet.cluster.global_arrays import digest, on_all_ranks
from jaxfleet.errors import FeedError, ProgramError
from jaxfleet.ir import Program
from jaxfleet.ops.basic import failed_check
from jaxfleet.ops.jax_adapter import dtype_text
from jaxfleet.ops.user_frames import warn_at_caller
from jaxfleet.strategy import DistributedStrategy
from jaxfleet.transport.messages import Kind, Tensor

if TYPE_CHECKING:  # ranks have no client
    from jaxfleet.ps.client.client import Client

_KEEPING = "distribute with strategy=DistributedStrategy(donate=False)"
# Deadlines may differ between ranks; an outer optimizer is part of the program's text.
_OWN = {"lost_after_s", "step_timeout_s", "connect_s", "outer"}


def check_state(leaves: Sequence[Any], tree: Any, captured: Captured) -> None:
    """Rejects a state unlike the example's; the error names the leaf and both types."""
    signature = captured.signature
    _check_structure("state", tree, signature.state_tree)
    if any(map(is_deleted, leaves)):
        raise used_before("state", [leaf.name for leaf in signature.state], leaves)
    for leaf, value in zip(signature.state, leaves, strict=True):
        _check_alive("state", value)
        shape, dtype = type_of(value)
        if shape != leaf.shape:
            found = ",".join(map(str, shape))
            variable = captured.program.variables[leaf.name]
            what = f"'{leaf.name}' is fed an array of shape [{found}], but it is {variable.type}"
            raise FeedError(what, hint="distribute the step again with an example of this state")
        _check_dtype(leaf, value, dtype, captured)


def check_batch(leaves: Sequence[Any], tree: Any, captured: Captured, *, devices: int) -> int:
    """Returns a batch's number of rows, after checking it against the example and the devices."""
    signature = captured.signature
    _check_structure("batch", tree, signature.batch_tree)
    rows: dict[int, str] = {}
    for leaf, value in zip(signature.batch, leaves, strict=True):
        _check_alive("batch", value)
        shape, dtype = type_of(value)
        if len(shape) != len(leaf.shape) or shape[1:] != leaf.shape[1:]:
            what = f"'{leaf.name}' has shape {list(shape)}, in the example {list(leaf.shape)}"
            raise FeedError(what, hint="only the number of rows may change")
        if leaf.name not in captured.keys or np.dtype(dtype).kind not in "iu":
            _check_dtype(leaf, value, dtype, captured)
        if shape:
            rows[shape[0]] = leaf.name
    if len(rows) > 1:
        listed = ", ".join(f"'{name}' has {count}" for count, name in rows.items())
        what = f"the batch's leaves differ in their rows: {listed}"
        raise FeedError(what, hint="axis 0 of every leaf is the batch; other arrays are state")
    count = next(iter(rows))
    check_rows(count, devices)
    return count


def check_rows(rows: int, count: int, *, of: str = "devices") -> None:
    """Rejects a number of rows that `count` devices, or trainers, named by `of`, cannot share."""
    if rows == 0:
        raise FeedError("the batch has no rows", hint="leave out a step that has nothing to learn")
    if rows % count:
        what = f"a batch of {rows} rows cannot be divided among {count} {of}"
        less = rows - rows % count
        near = f"{less} or {less + count}" if less else str(count)
        raise FeedError(what, hint=f"use a multiple of {count}, such as {near}")


def used_before(tree: str, names: Sequence[str] = (), leaves: Sequence[Any] = ()) -> FeedError:
    """Error for a `tree`, `state` or `batch`, whose memory was donated.

    With `names` and `leaves` it lists the deleted leaves; if others are alive, those are older.
    """
    hint = f"write state, metrics = step(state, batch), or {_KEEPING}"
    gone = [name for name, x in zip(names, leaves, strict=True) if is_deleted(x)]
    if not gone or len(gone) == sum(isinstance(x, jax.Array) for x in leaves):
        what = f"the {tree} was used before: the last step took its memory"
        return FeedError(what, hint=hint)
    what = f"'{gone[0]}' is of an older {tree}: a step since then took its memory"
    hint = "a reference, as in best = state.params, keeps no values: copy them, "
    hint += f"best = jax.tree.map(jnp.copy, state.params), or {_KEEPING}"
    return FeedError(what, hint=hint)


def mistake_in(error: Exception) -> Exception | None:
    """Returns the user's mistake that made a computation fail, if it is one."""
    if isinstance(error, RuntimeError) and (failed := failed_check(error)) is not None:
        return failed
    if "deleted" not in str(error):
        return None
    if looks_for_nans():  # jax computes the step again without jit, from a state that is gone
        what = "a value that the step computes is not finite, which jax_debug_nans or "
        return ProgramError(f"{what}jax_debug_infs rejects", hint=f"to see where, {_KEEPING}")
    return used_before("state")


def looks_for_nans() -> bool:
    """Whether jax examines the results of every computation."""
    return bool(jax.config.jax_debug_nans or jax.config.jax_debug_infs)  # type: ignore[attr-defined, unused-ignore]  # jax 0.10 makes them up


def is_deleted(value: Any) -> bool:
    """Whether a value is an array whose memory was donated or freed."""
    is_array = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    return is_array and value.is_deleted()


def type_of(value: Any) -> tuple[tuple[int, ...], Any]:
    """Returns the shape of a value, and its dtype as jax takes it, with its byte order."""
    if isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        return value.shape, value.dtype
    if isinstance(value, bool | int | float | complex):
        return (), jnp.result_type(value)
    array = np.asarray(value)
    return array.shape, jax.dtypes.canonicalize_dtype(array.dtype)


def _check_structure(tree: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        differs = difference(wanted, found)
        what = f"the {tree} has another structure than the example: {differs}"
        hint = f"distribute the step again with an example of this {tree}"
        if OTHER_ATTRIBUTE in differs:
            hint = f"call model.train() of an nnx model before the step, or {hint}"
        raise FeedError(what, hint=hint)


def _check_alive(tree: str, value: Any) -> None:
    if isinstance(value, jax.core.Tracer):
        what = f"the step is called inside a traced function: its {tree} holds a tracer"
        raise FeedError(what, hint="a step is compiled already; call it outside jit, grad and scan")
    if is_deleted(value):
        raise used_before(tree)


def _check_dtype(leaf: Leaf, value: Any, dtype: Any, captured: Captured) -> None:
    if dtype != leaf.dtype:
        variable = captured.program.variables[leaf.name]
        what = f"'{leaf.name}' is fed {_said(value, dtype)}, but it is {variable.type}"
        raise FeedError(what, hint=f"convert it to {variable.dtype} before the step")


def _said(value: Any, dtype: Any) -> str:
    """Returns the name of a value's dtype: the IR's or, if jax converts it, numpy's."""
    if not isinstance(value, np.ndarray | np.generic) or value.dtype == dtype:
        if not isinstance(dtype, np.dtype) or dtype.isnative:
            return dtype_text(dtype)
        return f"{dtype.name} of the other order of bytes"
    return f"{value.dtype.name}, which jax takes as {dtype_text(dtype)}"


def place_state(
    values: Sequence[Any], shardings: Sequence[Any], *, given: Sequence[int], beside: Sequence[Any]
) -> list[Any]:
    """Places the leaves of a state on a step's devices, so that it may take their memory.

    No two of them then share a buffer. On several devices XLA does not reject a buffer that it is
    given twice, it crashes; and averaged parameters do start as the parameters themselves.

    Args:
        values: the leaves; numpy arrays and numbers too, on any device.
        shardings: their destinations.
        given: the places of those whose memory the step takes.
        beside: the step's other arguments.
    """
    if all(sharding.is_fully_addressable for sharding in shardings):
        placed: list[Any] = jax.device_put(list(values), list(shardings))
    else:
        placed = [on_all_ranks(*pair) for pair in zip(values, shardings, strict=True)]
    if not given:
        return placed
    kept = set(range(len(placed))).difference(given)
    others = (value for value in beside if isinstance(value, jax.Array))
    taken = {buffer_of(array) for array in (*others, *(placed[place] for place in kept))}
    for place in given:
        if buffer_of(placed[place]) in taken:
            placed[place] = placed[place].copy()
        taken.add(buffer_of(placed[place]))
    return placed


def place_batch(values: list[Any], shardings: Sequence[Any], *, state: Container[Any]) -> list[Any]:
    """Prepares the leaves of a batch for `jit`.

    Arrays committed to other devices are moved. Uncommitted values stay: `jit` places them in less
    time than `device_put`. `state` has the arrays whose memory the step takes.
    """
    for place, sharding in enumerate(shardings):
        value = values[place]
        if isinstance(value, jax.Array):
            if value.is_deleted():
                raise used_before("batch")
            if value.committed and not _lies_so(value, sharding):
                value = jax.device_put(value, sharding)
            values[place] = value.copy() if value in state else value
    return values


def _lies_so(value: jax.Array, sharding: Any) -> bool:
    """Whether an array has this sharding; the mesh's name may differ."""
    found = value.sharding
    return found == sharding or found.is_equivalent_to(sharding, value.ndim)


def buffer_of(array: Any) -> int:
    """Returns the address of an array's first buffer in this process."""
    address: int = array.addressable_data(0).unsafe_buffer_pointer()
    return address


def description(
    strategy: DistributedStrategy, captured: Captured, program: Program, data: Sequence[Any]
) -> list[str]:
    """Returns the lines that must be the same on all ranks.

    They describe the strategy, the transpiled program, and the batch `data` of this rank.
    """
    fields = dataclasses.fields(strategy)
    names = [leaf.name for leaf in captured.signature.batch]
    return [
        f"jax {jax.__version__} with jax_enable_x64={jax.config.jax_enable_x64}",  # type: ignore[attr-defined, unused-ignore]  # jax 0.10 makes it up
        *(
            f"strategy: {x.name}={getattr(strategy, x.name)!r}"
            for x in fields
            if x.name not in _OWN
        ),
        *(f"batch: {n} {list(np.shape(x))}" for n, x in zip(names, data, strict=True)),
        *str(program).splitlines(),
    ]


def warn_of_own_batches(digests: Sequence[str], *, who: str = "rank") -> None:
    """Warns if ranks pass different batches where each should pass the whole one.

    It is not an error, since rows may be drawn at random on purpose. `digests` are the batches' by
    rank; `who` names the ranks.
    """
    if len(set(digests)) == 1:
        return
    differ = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    warn_at_caller(
        f"{who}s 0 and {differ} bring different batches, and of each only the rows at its own place"
        f" are used; where a {who} brings its own rows, say DistributedStrategy(batch='local')"
    )


def compare_batches(client: "Client", data: Sequence[Any]) -> None:
    """Warns, on every trainer, if their whole batches `data` differ; collective."""
    own = hashlib.sha256(" ".join(map(digest, data)).encode()).digest()[:8]
    came: list[np.ndarray] = []
    request = client.request(
        0,
        Kind.REDUCE,
        body={"key": "comparing batches", "how": "gather"},
        tensors=[Tensor("digest", np.frombuffer(own, np.int64))],
        wants=["digest"],
        sink=lambda answer: came.extend(tensor.array.copy() for tensor in answer),
    )
    client.wait([request])
    warn_of_own_batches([str(each) for array in came for each in array.ravel()], who="trainer")
