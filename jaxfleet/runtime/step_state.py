"""State of a step between its calls: what it returned, and what it keeps besides.

Passes keep variables beside the state (accumulated gradients, snapshots, a loss scale), and some
let every device have its own value of the user's leaves. A program declares them by attributes:

- `beside`: pairs of a variable and its initial value: a number, or a leaf of the state;
- `own`: per-device state, stacked along a leading axis;
- `shows`: pairs of such a leaf and the variable that the user sees instead; the others are shown
  as handles.
"""

import operator
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NoReturn, Self, TypeAlias
from weakref import getweakrefcount, ref

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxfleet.analysis.sharding import own_state
from jaxfleet.capture import Captured
from jaxfleet.checkpoint import Checkpoint
from jaxfleet.errors import FeedError
from jaxfleet.ir import Program, Variable
from jaxfleet.lower import Interface, LoweredStep
from jaxfleet.lower.host_transfer import device_dtype, is_key, to_device
from jaxfleet.runtime.checkpointing import on_host
from jaxfleet.runtime.step_inputs import check_state, place_state

Begin: TypeAlias = str | int | float
_EACH = "@EACH"  # name in checkpoints of a leaf's values on all devices: `m@EACH`
_WHERE = "the devices, each its own"


class Handle:
    """A leaf of the state that lives on servers; it holds no memory, and cannot be read.

    Attributes:
        name: the variable's.
        shape: of ints.
        dtype: numpy's, or jax's dtype of random keys.
        servers: the servers that hold it.
    """

    __slots__ = ("__weakref__", "dtype", "name", "servers", "shape")

    def __init__(self, name: str, shape: tuple[int, ...], dtype: Any, servers: str) -> None:
        self.name, self.shape, self.dtype, self.servers = name, shape, dtype, servers

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def again(self) -> Self:
        return type(self)(self.name, self.shape, self.dtype, self.servers)

    def __repr__(self) -> str:
        return f"<'{self.name}' {self.dtype}{list(self.shape)} on {self.servers}>"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        what = f"'{self.name}' lives on {self.servers} and cannot be read here"
        raise FeedError(what, hint="state = step.pull(state) brings it to this process")

    # jax checks for it before it reads an argument; its own error would not mention servers.
    __jax_array__ = property(_refuse)
    __array__ = __float__ = __int__ = __bool__ = __index__ = _refuse
    __getitem__ = __iter__ = __len__ = __neg__ = __abs__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __pow__ = __matmul__ = __rmatmul__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse
    # Common array attributes in scripts: an AttributeError would not show where the value is.
    sum = mean = max = min = std = var = prod = any = all = argmax = argmin = _refuse
    astype = reshape = ravel = flatten = squeeze = transpose = dot = copy = item = tolist = _refuse
    at = T = property(_refuse)


class LastState:
    """The leaves of a state, by weak references.

    References identify objects, where numbers like `id` are reused: a new array does get the
    address of an old one.
    """

    def __init__(self, leaves: Sequence[Any] = ()) -> None:
        self._leaves = list(map(ref, leaves))

    def is_made_of(self, leaves: Sequence[Any]) -> bool:
        same = len(leaves) == len(self._leaves)
        return same and all(map(operator.is_, map(operator.call, self._leaves), leaves))

    def __contains__(self, value: object) -> bool:
        # Runs at every step for each array of a batch, none of which has a weak reference.
        return getweakrefcount(value) > 0 and any(leaf() is value for leaf in self._leaves)


class NewestState:
    """Recognizes the leaves that a step returned last, by identity.

    Attributes:
        leaves: the last returned ones; none before the first time.
    """

    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        self.leaves: list[Any] = []

    def is_made_of(self, leaves: Sequence[Any]) -> bool:
        same = len(leaves) == len(self.leaves)
        return same and all(map(operator.is_, leaves, self.leaves))

    def places_of_others(self, leaves: Sequence[Any]) -> list[int]:
        known = self.leaves or [None] * len(leaves)
        pairs = zip(leaves, known, strict=True)
        return [place for place, (leaf, old) in enumerate(pairs) if leaf is not old]

    def check(self, leaves: Sequence[Any], tree: Any) -> None:
        """Checks that a state matches the example, and has no handles of another step."""
        known = {id(leaf) for leaf in self.leaves}
        for leaf in leaves:
            if isinstance(leaf, Handle) and id(leaf) not in known:
                what = f"{leaf!r} is of another step"
                raise FeedError(what, hint="begin with real values: pull them, or restore them")
        spec = [_stand_in(leaf) if isinstance(leaf, Handle) else leaf for leaf in leaves]
        check_state(spec, tree, self._captured)


def _stand_in(handle: Handle) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(handle.shape, handle.dtype)


def beside(program: Program) -> dict[str, Begin]:
    """Returns the variables that a step keeps beside the user's state, and their initial values."""
    return {str(name): begin for name, begin in _pairs(program, "beside")}


class AuxiliaryState:
    """Keeps the part of a step's state that it does not return.

    A state that the step did not return is new: values bound to a leaf are initialized from that
    leaf, and numbers are reset if no leaf comes from the last returned state.

    Args:
        captured: the step.
        program: transpiled.
        interface: mapping of trees to its variables.
        lowered: the compiled program.
    """

    def __init__(
        self, captured: Captured, program: Program, interface: Interface, lowered: LoweredStep
    ) -> None:
        self._newest = NewestState(captured)
        self._names = interface.held
        self._user = len(interface.state)
        self._variables = [program.variables[name] for name in self._names]
        self._places = {name: place for place, name in enumerate(self._names)}
        self._begins = beside(program)
        self._shown = {str(name): str(by) for name, by in _pairs(program, "shows")}
        self._own = frozenset(self._places[name] for name in own_state(program))
        self._lowered = lowered
        self._values: list[Any] = []

    def taken(self, leaves: Sequence[Any], tree: Any, data: Sequence[Any]) -> list[Any]:
        """Returns the compiled step's arguments for a state, after checking it."""
        if not self._newest.is_made_of(leaves):
            self._newest.check(leaves, tree)
            self._begin(leaves, self._newest.places_of_others(leaves), data)
        return self._values

    def shown(self, values: list[Any]) -> list[Any]:
        """Keeps a step's new values, and returns the leaves that its user sees."""
        self._values = values
        self._newest.leaves = [self._leaf(place) for place in range(self._user)]
        return self._newest.leaves

    def pulled(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns a state with a value for every leaf: the mean of per-device values.

        Of numbers without a mean it is the largest.
        """
        if not self._newest.is_made_of(leaves) or not self._own:
            return list(leaves)
        places = sorted(place for place in self._own if place < self._user)
        means = self._mean([self._values[place] for place in places])
        found = dict(zip(places, means, strict=True))
        return [found.get(place, leaf) for place, leaf in enumerate(leaves)]

    def numbers(self) -> dict[str, float]:
        """Returns the numbers beside the state, by name, once a step has run.

        Per-device floats are averaged, integers maximized, over this process's devices, so that no
        other process takes part.
        """
        if not self._values:
            return {}
        places = {name: self._places[name] for name in self._begins}
        numbers = {name: n for name, n in places.items() if not self._variables[n].shape}
        found = {
            name: _mean_here(self._values[n]) if n in self._own else self._values[n]
            for name, n in numbers.items()
        }
        return {name: np.asarray(value).item() for name, value in found.items()}

    def newest(self, name: str) -> Any:
        """Returns a number beside the state, as this process's first device has it.

        It may not be computed yet, and the next step leaves it alone; None if there is none.
        """
        if name not in self._begins or not self._values:
            return None
        return jnp.copy(self._values[self._places[name]].addressable_data(0)).reshape(())

    def to_save(self) -> dict[str, np.ndarray]:
        """Returns the values that checkpoints contain besides the user's leaves."""
        extra = self._extra()
        whole = self._gathered([self._values[place] for place in extra.values()])
        return {name: on_host(x) for name, x in zip(extra, whole, strict=True)}

    def restored(self, leaves: list[Any], tree: Any, checkpoint: Checkpoint) -> list[Any]:
        """Takes over a checkpoint's state, and returns its leaves.

        Values that it lacks, of another strategy or number of devices, are initialized anew.
        """
        self._newest.leaves = []
        self.taken(leaves, tree, ())
        extra, known = self._extra(), set(checkpoint.names())
        if all(name in known and self._fits(checkpoint, name, n) for name, n in extra.items()):
            for name, place in extra.items():
                self._values[place] = self._placed(checkpoint.read(name), place)
        return self.shown(self._values)

    def _begin(self, leaves: Sequence[Any], others: Sequence[int], data: Sequence[Any]) -> None:
        """Takes over a state, of which the leaves at `others` are new."""
        lowered, is_new = self._lowered, len(others) == self._user or not self._values
        values = self._values or [None] * len(self._names)
        fresh = [leaves[place] for place in others]
        lies = [self._whole if n in self._own else lowered.state_shardings[n] for n in others]
        given = [at for at, place in enumerate(others) if place not in self._own]
        placed = place_state(fresh, lies, given=given, beside=(*data, *values))
        known = dict(zip(others, placed, strict=True))
        for place in others:
            value = known[place]
            values[place] = self._spread(value, place) if place in self._own else value
        for name, begin in self._begins.items():
            place = self._places[name]
            if isinstance(begin, str) and self._places[begin] in known:
                values[place] = self._spread(known[self._places[begin]], place)
            elif is_new and not isinstance(begin, str):
                values[place] = self._spread(_full(self._variables[place], begin), place)
        self._values = values

    def _spread(self, value: Any, place: int) -> Any:
        """Returns a copy of a value in the form of the state at a place."""
        front, sharding = place in self._own, self._lowered.state_shardings[place]

        def copied(x: Any) -> Any:
            return jnp.broadcast_to(x[None], (self._count, *x.shape)) if front else jnp.copy(x)

        return jax.jit(copied, out_shardings=sharding)(value)

    def _leaf(self, place: int) -> Any:
        name, variable = self._names[place], self._variables[place]
        if name in self._shown:
            return self._values[self._places[self._shown[name]]]
        if place not in self._own:
            return self._values[place]
        shape: Any = variable.shape
        return Handle(name, shape, device_dtype(variable.dtype), _WHERE)

    def _mean(self, values: list[Any]) -> list[Any]:
        def mean(xs: list[Any]) -> list[Any]:
            return [
                jnp.mean(x, 0).astype(x.dtype)
                if jnp.issubdtype(x.dtype, jnp.inexact)
                else x[0]
                if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
                else jnp.max(x, 0)
                for x in xs
            ]

        made: list[Any] = jax.jit(mean, out_shardings=self._whole)(values)
        return made

    def _gathered(self, values: list[Any]) -> list[Any]:
        made: list[Any] = jax.jit(_same, out_shardings=self._whole)(values)
        return made

    def _extra(self) -> dict[str, int]:
        """Returns the places of the values that checkpoints contain besides the user's leaves."""
        own = {f"{self._names[n]}{_EACH}": n for n in sorted(self._own) if n < self._user}
        return {**own, **{name: self._places[name] for name in self._begins}}

    def _fits(self, checkpoint: Checkpoint, name: str, place: int) -> bool:
        held: tuple[int, ...] = np.shape(self._values[place])
        return checkpoint.shape(name) == held

    def _placed(self, array: np.ndarray, place: int) -> Any:
        sharding = self._values[place].sharding
        if is_key(self._variables[place].dtype):
            return jax.device_put(to_device(array, self._variables[place].dtype)[0], sharding)
        return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

    @cached_property
    def _whole(self) -> Any:
        first: Any = self._lowered.state_shardings[0]
        if isinstance(first, NamedSharding):
            return NamedSharding(first.mesh, PartitionSpec())
        return first

    @cached_property
    def _count(self) -> int:
        return len(self._whole.device_set)


def _same(values: list[Any]) -> list[Any]:
    return [jnp.copy(value) for value in values]


def _mean_here(value: Any) -> Any:
    """Returns the mean of a per-device number over this process's devices."""
    here = np.concatenate([np.ravel(shard.data) for shard in value.addressable_shards])
    return here.mean() if jnp.issubdtype(here.dtype, jnp.inexact) else here.max()


def _full(variable: Variable, value: float) -> Any:
    shape: Any = variable.shape
    return np.full(shape, value, device_dtype(variable.dtype))


def _pairs(program: Program, attr: str) -> Sequence[Any]:
    pairs: Any = program.attrs.get(attr, ())
    return tuple(pairs)
