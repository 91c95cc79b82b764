"""Valid sources of a state, donated leaves, and remaining ones."""

import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxfleet as jf
from jaxfleet.errors import FeedError, ProgramError
from jaxfleet.runtime.step_call import Call
from jaxfleet.runtime.step_state import Handle, LastState
from tests.runtime.toys import (
    State,
    assert_alike,
    distributed,
    plain,
    rows,
    start,
    training,
)


def everywhere(devices: int) -> NamedSharding:
    """Returns a replicated sharding over a user's own mesh."""
    return NamedSharding(Mesh(np.array(jax.devices()[:devices]), ("mine",)), PartitionSpec())


@pytest.mark.parametrize("devices", [1, 4])
def test_a_step_takes_the_memory_of_the_state_it_returned(devices: int) -> None:
    step, state = distributed(devices=devices)
    state, _ = step(state, rows(8))
    again, _ = step(state, rows(8))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(again))


@jax.tree_util.register_pytree_node_class
class Scale:
    """A node whose constructor makes arrays of its leaves, as jmp's loss scales."""

    def __init__(self, value: Any) -> None:
        self.value = jnp.asarray(value, jnp.float32)

    def tree_flatten(self) -> tuple[tuple[jax.Array], None]:
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _: None, leaves: tuple[Any]) -> "Scale":
        return cls(*leaves)


def test_a_tree_whose_constructor_makes_arrays_is_a_state() -> None:
    def step(scale: Scale, batch: Any) -> tuple[Scale, Any]:
        return Scale(scale.value * 2), batch.sum() * scale.value

    made = jf.distribute(step, (Scale(1.0), np.ones(8, "f4")), jf.DistributedStrategy(devices=2))
    state, total = made(*made(Scale(1.0), np.ones(8, "f4"))[:1], np.ones(8, "f4"))
    assert [float(state.value), float(total)] == [4.0, 16.0]


@pytest.mark.parametrize("devices", [1, 4])
def test_a_value_that_debug_nans_rejects_is_not_taken_for_a_state_that_was_used(
    devices: int,
) -> None:
    step, state = distributed(devices=devices)
    state, _ = step(state, rows(8))
    with jax.debug_nans(True), pytest.raises(ProgramError, match="jax_debug_nans") as caught:
        step(state, {**rows(8), "x": np.full((8, 6), np.nan, np.float32)})
    assert "donate=False" in str(caught.value.hint)


def test_the_message_of_a_check_in_a_step_may_name_donation() -> None:
    def failing(*_: Any) -> Any:
        raise RuntimeError("INTERNAL: ProgramError: do not donate what was deleted")

    variant: Any = None  # only the executable runs
    call = Call(variant, failing)
    with pytest.raises(ProgramError, match=r"^do not donate what was deleted") as caught:
        call.on_accepted({}, [], is_returned=True)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert call.executable is failing


@pytest.mark.parametrize("devices", [1, 4])
def test_without_donation_a_state_can_be_used_again(devices: int) -> None:
    step, state = distributed(jf.DistributedStrategy(devices=devices, donate=False))
    state, _ = step(state, rows(8))
    first, second = step(state, rows(8)), step(state, rows(8))
    assert_alike(first, second)
    assert step.memory_analysis().alias_size_in_bytes == 0


@pytest.mark.parametrize("devices", [1, 4])
def test_all_results_are_there_once_a_step_returns_on_several_cpu_devices(devices: int) -> None:
    step, state = distributed(devices=devices)
    for _ in range(20):
        state, metrics = step(state, rows(8))
        ready = [leaf.is_ready() for leaf in jax.tree.leaves((state, metrics))]
        assert devices == 1 or all(ready)


@pytest.mark.few(5)
@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize(
    "move",
    [
        lambda state: jax.tree.map(np.asarray, state),
        lambda state: jax.device_put(state, jax.devices()[0]),
        lambda state: jax.device_put(state, jax.devices()[5]),
        lambda state: jax.device_put(state, everywhere(4)),
        lambda state: jax.device_put(state, everywhere(8)),
    ],
    ids=["numpy", "first device", "sixth device", "another mesh", "more devices"],
)
def test_a_state_may_come_from_anywhere(move: Any, devices: int) -> None:
    step, state = distributed(devices=devices)
    state, _ = step(move(state), rows(8))
    state, metrics = step(state, rows(8))
    assert_alike((state, metrics), plain(2, rows(8)))
    assert all(len(leaf.sharding.device_set) == devices for leaf in jax.tree.leaves(state))


def test_a_state_may_come_from_a_step_on_another_number_of_devices() -> None:
    (two, state), (four, _), (one, _) = (distributed(devices=n) for n in (2, 4, 1))
    for step in (two, four, one, two, four):
        state, metrics = step(state, rows(8))
    assert_alike((state, metrics), plain(5, rows(8)))


def test_place_puts_a_state_where_the_step_wants_it() -> None:
    step, state = distributed()
    placed = step.place(state)
    assert all(len(leaf.sharding.device_set) == 4 for leaf in jax.tree.leaves(placed))
    assert_alike(step(placed, rows(8)), plain(1, rows(8)))


def averaging(state: State) -> State:
    """Returns the state with averages of the parameters: at first the parameters themselves."""
    return {**state, "average": state["params"]}


def with_averages(tx: optax.GradientTransformation) -> Any:
    """Returns a step that also keeps averages of the parameters."""
    train_step = training(tx)

    def step(state: State, batch: Any) -> tuple[State, Any]:
        average = state["average"]
        state, metrics = train_step(state, batch)
        average = jax.tree.map(lambda x, y: 0.9 * x + 0.1 * y, average, state["params"])
        return {**state, "average": average}, metrics

    return step


@pytest.mark.few(2)
@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize(
    "share",
    [lambda state: state, lambda state: jax.device_put(state, everywhere(4))],
    ids=["one array twice", "two arrays in one buffer"],
)
def test_a_state_may_hold_one_array_twice(share: Any, devices: int) -> None:
    tx = jf.distributed_optimizer(optax.adam(0.1))
    example = (averaging(start(tx)), rows(8))
    step = jf.distribute(with_averages(tx), example, jf.DistributedStrategy(devices=devices))
    wanted, state = averaging(start(tx)), share(averaging(start(tx)))
    for _ in range(3):
        wanted, _ = jax.jit(with_averages(tx))(wanted, rows(8))
        state, _ = step(state, rows(8))
    assert_alike(state, wanted)
    # Also later: here the averages are reset.
    wanted, _ = jax.jit(with_averages(tx))(averaging(wanted), rows(8))
    state, _ = step(averaging(state), rows(8))
    assert_alike(state, wanted)


def the_call(step: Any) -> Call:
    (call,) = step._calls.values()  # noqa: SLF001
    assert isinstance(call, Call)
    return call


def test_a_used_state_is_refused_before_xla_writes_of_it(capfd: pytest.CaptureFixture[str]) -> None:
    step, first = distributed(devices=1)
    second, _ = step(first, rows(8))
    third, _ = step(second, rows(8))
    mixed = {**third, "params": second["params"]}
    for state in (second, first, {**second}, mixed):
        with pytest.raises(FeedError, match="took its memory"):
            step(state, rows(8))
    step(third, rows(8))
    assert "INVALID_ARGUMENT" not in capfd.readouterr().err


@pytest.mark.parametrize("copies", [lambda x: x, lambda x: x.addressable_data(0)])
def test_after_a_shared_buffer_a_step_is_as_fast_as_before(
    copies: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Only the call whose state shares a buffer goes the way of a foreign state."""
    tx = jf.distributed_optimizer(optax.sgd(0.1))
    example = (averaging(start(tx)), rows(8))
    step = jf.distribute(with_averages(tx), example, jf.DistributedStrategy(devices=1))
    wanted, state = averaging(start(tx)), averaging(start(tx))
    for shares in (False, True, False, True):
        if shares:
            wanted = averaging(wanted)
            state = {**state, "average": jax.tree.map(copies, state["params"])}
        wanted, _ = jax.jit(with_averages(tx))(wanted, rows(8))
        state, _ = step(state, rows(8))
        assert the_call(step).executable is not None
    assert_alike(state, wanted)
    assert capfd.readouterr().err.count("INVALID_ARGUMENT") <= 1
    call = the_call(step)
    executable, ran = call.executable, 0

    def counting(*args: Any) -> Any:
        nonlocal ran
        ran += 1
        return executable(*args)

    call.executable = counting
    for _ in range(2):
        state, _ = step(state, rows(8))
    assert ran == 2


@pytest.mark.parametrize("devices", [1, 4])
def test_a_batch_may_hold_an_array_of_the_state(devices: int) -> None:
    tx = jf.distributed_optimizer(optax.adam(0.1))
    train_step = training(tx)

    def step(state: State, batch: Any) -> tuple[State, Any]:
        scaled = {"x": batch["x"], "y": batch["y"] * (1.0 + batch["b"])}
        return train_step(state, scaled)

    state = start(tx)
    batch = {**rows(8), "b": state["params"]["b"]}
    distributed = jf.distribute(step, (state, batch), jf.DistributedStrategy(devices=devices))
    wanted = start(tx)
    for _ in range(3):
        wanted, _ = jax.jit(step)(wanted, {**rows(8), "b": wanted["params"]["b"]})
        state, _ = distributed(state, {**rows(8), "b": state["params"]["b"]})
    assert_alike(state, wanted)


@pytest.mark.parametrize("devices", [1, 4])
def test_what_a_step_only_reads_stays_the_array_that_it_was(devices: int) -> None:
    tx = jf.distributed_optimizer(optax.adam(0.1))
    train_step = training(tx)

    def step(state: State, batch: Any) -> tuple[State, Any]:
        shifted = {"x": batch["x"] + state["shift"], "y": batch["y"]}
        return train_step(state, shifted)

    state = {**start(tx), "shift": jnp.ones(())}
    distributed = jf.distribute(step, (state, rows(8)), jf.DistributedStrategy(devices=devices))
    state, _ = distributed(state, rows(8))
    again, _ = distributed(state, rows(8))
    assert again["shift"] is state["shift"]
    assert not state["shift"].is_deleted()
    assert state["params"]["w"].is_deleted()


@pytest.mark.parametrize("devices", [1, 4])
def test_an_evaluation_keeps_the_state(devices: int) -> None:
    def evaluate(state: State, batch: Any) -> tuple[State, Any]:
        errors = batch["x"] @ state["params"]["w"] - batch["y"]
        return state, {"worst": jnp.abs(errors).max(), "mean": jnp.square(errors).mean()}

    state = start(optax.adam(0.1))
    step = jf.distribute(evaluate, (state, rows(8)), jf.DistributedStrategy(devices=devices))
    assert isinstance(step, jf.Step)
    state = step.place(state)
    same, metrics = step(state, rows(24))
    _, wanted = jax.jit(evaluate)(start(optax.adam(0.1)), rows(24))
    assert_alike(metrics, wanted)
    kept = zip(jax.tree.leaves(same), jax.tree.leaves(state), strict=True)
    assert all(x is y and not x.is_deleted() for x, y in kept)


@pytest.mark.parametrize("devices", [1, 4])
def test_a_step_needs_no_metrics(devices: int) -> None:
    tx = jf.distributed_optimizer(optax.adam(0.1))
    train_step = training(tx)

    def step(state: State, batch: Any) -> tuple[State, Any]:
        return train_step(state, batch)[0], {}

    state = start(tx)
    distributed = jf.distribute(step, (state, rows(8)), jf.DistributedStrategy(devices=devices))
    state, metrics = distributed(state, rows(8))
    assert metrics == {}
    assert_alike(state, plain(1, rows(8))[0])


@pytest.mark.few(1)
@pytest.mark.parametrize("devices", [1, 4])
def test_a_state_may_hold_arrays_of_random_keys(devices: int) -> None:
    tx = jf.distributed_optimizer(optax.adam(0.1))
    train_step = training(tx)

    def step(state: State, batch: Any) -> tuple[State, Any]:
        keys = jax.vmap(lambda key: jax.random.split(key)[0])(state["keys"])
        noise = jax.random.normal(keys[1], batch["y"].shape)
        return train_step({**state, "keys": keys}, {"x": batch["x"], "y": batch["y"] + noise})

    def fresh() -> State:
        return {**start(tx), "keys": jax.random.split(jax.random.key(3), 2)}

    state, wanted = fresh(), fresh()
    distributed = jf.distribute(step, (state, rows(8)), jf.DistributedStrategy(devices=devices))
    for _ in range(3):
        state, _ = distributed(state, rows(8))
        wanted, _ = jax.jit(step)(wanted, rows(8))
    assert_alike(state["params"], wanted["params"])
    assert (jax.random.key_data(state["keys"]) == jax.random.key_data(wanted["keys"])).all()


@pytest.mark.parametrize("devices", [1, 4])
def test_a_state_that_another_function_took_is_refused(devices: int) -> None:
    step, state = distributed(devices=devices)
    state, _ = step(state, rows(8))
    jax.block_until_ready(
        jax.jit(lambda tree: jax.tree.map(jnp.negative, tree), donate_argnums=0)(state)
    )
    with pytest.raises(FeedError, match="the state was used before"):
        step(state, rows(8))


def test_one_device_does_not_look_at_the_leaves_of_a_state_that_it_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step, state = distributed(devices=1)
    state, _ = step(state, rows(8))
    with monkeypatch.context() as patched:
        patched.setattr("jaxfleet.runtime.step.check_state", None)
        patched.setattr("jaxfleet.runtime.step.place_state", None)
        for _ in range(3):
            state, metrics = step(state, rows(8))
    assert_alike((state, metrics), plain(4, rows(8)))


def replaced(state: State, leaf: Any) -> State:
    return {**state, "params": {**state["params"], "w": leaf}}


def test_one_device_takes_other_leaves_like_those_that_it_returned() -> None:
    step, state = distributed(devices=1)
    wanted = start(optax.adam(0.1))
    train_step = jax.jit(training(optax.adam(0.1)))
    for leaf in (None, np.full(6, 0.5, np.float32), jax.device_put(np.ones(6), jax.devices()[3])):
        if leaf is not None:
            state, wanted = replaced(state, leaf), replaced(wanted, np.asarray(leaf))
        state, _ = step(state, rows(8))
        wanted, _ = train_step(wanted, rows(8))
    assert_alike(state, wanted)
    assert state["params"]["w"].devices() == set(step.devices)


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (np.ones(6, np.int32), "is fed i32, but it is f32"),
        (np.ones(7, np.float32), r"is fed an array of shape \[7\], but it is f32\[6\]"),
        ({"more": np.ones(6, np.float32)}, "the state has another structure"),
        ("text", "'params/w'"),
    ],
)
def test_one_device_refuses_other_leaves_later_too(leaf: Any, message: str) -> None:
    step, state = distributed(devices=1)
    state, _ = step(state, rows(8))
    older = state["params"]["w"]
    with pytest.raises(FeedError, match=message):
        step(replaced(state, leaf), rows(8))
    state, _ = step(state, rows(8))  # the refused call took nothing
    with pytest.raises(FeedError, match="'params/w' is of an older state"):
        step(replaced(state, older), rows(8))
    with pytest.raises(FeedError, match="called inside a traced function"):
        jax.jit(lambda state: step(state, rows(8)))(state)
    step(state, rows(8))


def test_an_array_is_compared_with_the_leaves_only_if_something_refers_to_it_weakly() -> None:
    leaf, other, watched = (jnp.ones(3) for _ in range(3))
    last, watcher = LastState([leaf]), weakref.ref(watched)
    assert leaf in last
    assert watcher() not in last
    last._leaves = None  # type: ignore[assignment]  # noqa: SLF001  # must not be read
    assert other not in last


def test_what_has_the_place_of_a_leaf_that_is_gone_is_no_leaf() -> None:
    leaf = Handle("w", (3,), np.float32, "server 0")
    last, place = LastState([leaf]), id(leaf)
    assert last.is_made_of([leaf])
    assert leaf in last
    del leaf
    others: list[Handle] = []
    while not others or (id(others[-1]) != place and len(others) < 1000):
        others.append(Handle("w", (3,), np.float32, "server 0"))
    assert id(others[-1]) == place, "who comes next has the memory of who was gone last"
    assert not last.is_made_of(others[-1:])
    assert others[-1] not in last
