"""Methods of a parameter server step other than the call itself, as on one device."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfleet.errors import FeedError
from jaxfleet.runtime.simulated_job import Twin, TwinResult
from jaxfleet.runtime.step_state import Handle
from jaxfleet.runtime.trainer_step import TrainerStep
from tests.exact.common import STEPS, Cut, Prepared, assert_same, executables, prepared
from tests.runtime.comparing import FLOAT32
from tests.shared_zoo import arrays
from tests.tiers import by_default
from tests.zoo import ZOO

CUT = Cut(servers=2, min_block_size=16, trainers=2)
Script = Callable[[TrainerStep], tuple[Any, tuple[Any, ...]]]
NOTHING: tuple[Any, ...] = ()


def twin_of(ready: Prepared, cut: Cut = CUT, **options: Any) -> Twin:
    return Twin(
        ready.captured,
        strategy=replace(cut.strategy, **options),
        servers=cut.servers,
        trainers=cut.trainers,
        cache=executables(),
    )


def play(script: Script, name: str = "mlp", cut: Cut = CUT, **options: Any) -> TwinResult:
    return twin_of(prepared(name), cut, **options).play(script)


def trained(ready: Prepared, state: Any, batches: Sequence[Any]) -> Any:
    """Returns the state after the plain function on one device."""
    step = jax.jit(ready.built.train_step)
    for batch in batches:
        state, _ = step(state, batch)
    return state


def hint_of(error: BaseException) -> str:
    return "".join(error.__notes__).strip().removeprefix("hint: ")


def assert_near(found: Any, wanted: Any, allowed: float = FLOAT32) -> None:
    for x, y in zip(arrays(found), arrays(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=allowed, atol=allowed)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", by_default(["mlp", "lion", "embedding", "schedule", "freeze"], "lion", "embedding")
)
def test_one_trainer_and_one_server_are_one_device(name: str) -> None:
    ready = prepared(name)
    batches = ready.batches[:STEPS]
    result = twin_of(ready, Cut()).run(ready.built.state, batches)
    # The same operators in the same order, compiled in other pieces: XLA fuses, and so rounds,
    # multiplications with additions only inside one piece.
    wanted = trained(ready, ready.built.state, batches)
    assert_near(result.states[0], wanted, 2e-7 * len(batches))


def test_the_last_batch_may_be_smaller() -> None:
    ready, rows = prepared("mlp"), ZOO["mlp"].rows
    batches = [ready.built.batch(0, rows), ready.built.batch(1, rows), ready.built.batch(2, 8)]
    result = twin_of(ready).run(ready.built.state, batches)
    assert_same(result.states[1], result.states[0], "on trainer 1")
    assert_near(result.states[0], trained(ready, ready.built.state, batches))


def test_trainers_that_bring_other_batches_where_each_should_bring_the_whole_are_warned() -> None:
    ready = prepared("mlp")

    def script(step: TrainerStep) -> tuple[Any, tuple[Any, ...]]:
        own = ready.batches[step.client.me.trainer]
        state, _ = step(ready.built.state, own)
        step(state, own)  # one warning from each
        return None, NOTHING

    differ = r"trainers 0 and 1 bring different batches, .* DistributedStrategy\(batch='local'\)"
    with pytest.warns(UserWarning, match=differ) as said:
        twin_of(ready).play(script)
    assert [each.filename for each in said] == [__file__] * 2


@pytest.mark.grid
def test_batches_of_many_sizes_in_any_order() -> None:
    ready = prepared("cnn_batchnorm")
    batches = [ready.built.batch(at, rows) for at, rows in enumerate((4, 16, 8, 16, 4))]
    result = twin_of(ready).run(ready.built.state, batches)
    assert_near(result.states[0], trained(ready, ready.built.state, batches))


def test_a_batch_that_trainers_cannot_share_is_refused_with_its_rows() -> None:
    ready = prepared("mlp")

    def script(step: TrainerStep) -> Any:
        with pytest.raises(FeedError, match="9 rows cannot be divided among 2 trainers") as caught:
            step(ready.built.state, ready.built.batch(0, 9))
        assert hint_of(caught.value) == "use a multiple of 2, such as 8 or 10"
        state, _ = step(ready.built.state, ready.batches[0])  # and the job continues
        return step.pull(state), NOTHING

    result = play(script)
    assert_near(result.states[0], trained(ready, ready.built.state, ready.batches[:1]))


def test_parameters_that_all_trainers_set_anew_are_trained_from_there() -> None:
    ready = prepared("mlp")

    def anew(state: Any) -> Any:
        return {**state, "params": jax.tree.map(lambda x: 0.5 * x, ready.built.state["params"])}

    def script(step: TrainerStep) -> Any:
        state = ready.built.state
        for number, batch in enumerate(ready.batches[:6]):
            state = anew(state) if number == 3 else state
            state, _ = step(state, batch)
        return step.pull(state), NOTHING

    result = play(script)
    assert_same(result.states[1], result.states[0], "on trainer 1")
    half = trained(ready, ready.built.state, ready.batches[:3])
    assert_near(result.states[0], trained(ready, anew(half), ready.batches[3:6]))


@pytest.mark.grid
def test_a_learning_rate_that_the_user_sets_holds_from_the_next_step() -> None:
    ready = prepared("injected_rate")

    def slower(state: Any) -> Any:
        state["opt_state"].hyperparams["learning_rate"] = jnp.float32(1e-3)
        return state

    def script(step: TrainerStep) -> Any:
        state = ready.built.state
        for number, batch in enumerate(ready.batches[:6]):
            state = slower(state) if number == 3 else state
            state, _ = step(state, batch)
        return step.pull(state), NOTHING

    result = play(script, "injected_rate")
    assert_same(result.states[1], result.states[0], "on trainer 1")
    half = trained(ready, ready.built.state, ready.batches[:3])
    assert_near(result.states[0], trained(ready, slower(half), ready.batches[3:6]))


def test_a_whole_state_from_elsewhere_replaces_the_servers() -> None:
    ready = prepared("mlp")
    elsewhere = trained(ready, ready.built.state, ready.batches[:4])

    def script(step: TrainerStep) -> Any:
        state, _ = step(ready.built.state, ready.batches[0])
        state, _ = step(elsewhere, ready.batches[4])
        return step.pull(state), NOTHING

    result = play(script)
    assert_near(result.states[0], trained(ready, elsewhere, ready.batches[4:5]))


def test_the_state_of_an_earlier_step_cannot_be_pulled() -> None:
    ready = prepared("mlp")

    def script(step: TrainerStep) -> Any:
        first, _ = step(ready.built.state, ready.batches[0])
        last, _ = step(first, ready.batches[1])
        with pytest.raises(FeedError, match="not what the last step returned") as caught:
            step.pull(first)
        assert hint_of(caught.value) == "pull the state that step(...) returned last"
        return step.pull(last), NOTHING

    result = play(script)
    assert_near(result.states[0], trained(ready, ready.built.state, ready.batches[:2]))


def test_the_state_of_an_earlier_step_cannot_be_trained_on() -> None:
    ready = prepared("mlp")

    def script(step: TrainerStep) -> Any:
        first, _ = step(ready.built.state, ready.batches[0])
        last, _ = step(first, ready.batches[1])
        with pytest.raises(FeedError, match="of another step") as caught:
            step(first, ready.batches[2])
        assert "pull them" in hint_of(caught.value)
        return step.pull(last), NOTHING

    result = play(script)
    assert_near(result.states[0], trained(ready, ready.built.state, ready.batches[:2]))


def test_reading_a_handle_says_how_to_get_the_value() -> None:
    ready = prepared("mlp")

    def script(step: TrainerStep) -> Any:
        state, _ = step(ready.built.state, ready.batches[0])
        handles = [x for x in jax.tree.leaves(state) if isinstance(x, Handle)]
        assert {handle.name.rsplit("/", 2)[0] for handle in handles} >= {"opt_state/0/mu"}
        reads: tuple[Callable[[Any], Any], ...] = (np.asarray, float, jnp.sum, jax.jit(jnp.exp))
        for read in reads:
            with pytest.raises(FeedError, match="server") as caught:
                read(handles[0])
            assert "pull(state)" in hint_of(caught.value)
        return step.pull(state), NOTHING

    play(script)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", by_default(["mlp", "dropout", "cnn_batchnorm", "aux_metrics"], "dropout", "aux_metrics")
)
def test_trainers_with_their_own_rows_do_what_those_with_the_whole_batch_do(name: str) -> None:
    ready, rows = prepared(name), ZOO[name].rows

    def script(step: TrainerStep) -> Any:
        state, metrics = ready.built.state, []
        mine = slice(*(step.client.me.trainer * rows // 2 + at for at in (0, rows // 2)))
        for batch in ready.batches[:4]:
            state, measured = step(state, jax.tree.map(lambda x: x[mine], batch))
            metrics.append(measured)
        return step.pull(state), tuple(metrics)

    local = play(script, name, batch="local")
    whole = twin_of(ready).run(ready.built.state, ready.batches[:4])
    assert_same(local.states, whole.states, "with local rows")
    assert_same(local.metrics, whole.metrics, "with local rows")
