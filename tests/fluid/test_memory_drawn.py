"""Drawn fluid programs keep their results when variables share names or are released."""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxfleet import fluid
from jaxfleet.fluid import layers
from jaxfleet.fluid.framework.to_ir import ir_program
from tests.fluid.nets import fresh
from tests.fluid.parallel import batch
from tests.passes.following import check_rewritten

WIDTH = 6
FEEDS = [batch(5, seed) for seed in range(2)]


class Net:
    """Draws layers on `h`; the last of them are fetched besides the loss."""

    def __init__(self, drawn: random.Random) -> None:
        self.random = drawn

    def build(self) -> tuple[fluid.Variable, fluid.Variable]:
        x, y = fluid.data("x", [None, WIDTH]), fluid.data("y", [None, 1], "int64")
        h = x
        for _ in range(self.random.randint(2, 6)):
            h = getattr(self, self.random.choice(self.KINDS))(h)
        out = layers.fc(h, 3, act="softmax")
        loss = layers.mean(layers.cross_entropy(out, y))
        makes = self.random.choice([fluid.optimizer.SGD, fluid.optimizer.Adam])
        makes(0.1).minimize(loss)
        return loss, out

    KINDS = ("dense", "masked", "narrow", "residual", "switched", "looped", "renamed")

    def dense(self, h: Any) -> Any:
        return layers.fc(h, WIDTH, act=self.random.choice(["tanh", "relu"]))

    def masked(self, h: Any) -> Any:
        return layers.dropout(layers.scale(h, 1.5), 0.3)

    def narrow(self, h: Any) -> Any:
        left = layers.tanh(layers.slice(h, [1], [0], [WIDTH // 2]))
        return layers.concat([left, layers.scale(left, 0.5)], axis=1)

    def residual(self, h: Any) -> Any:
        return layers.elementwise_add(h, layers.tanh(layers.scale(h, 0.3)))

    def switched(self, h: Any) -> Any:
        """Adds a number that a branch selects, from its own arrays."""
        rate = layers.fill_constant([1], "float32", 0.25)
        rate.stop_gradient = True
        limit = layers.fill_constant([1], "float32", self.random.choice([0.0, 1.0]))
        with layers.Switch() as switch:
            with switch.case(layers.less_than(rate, limit)):
                twice = layers.scale(layers.scale(layers.scale(rate, 2.0), 2.0), 0.5)
                layers.assign(twice, rate)
            with switch.default():
                layers.assign(layers.scale(rate, 3.0), rate)
        return layers.elementwise_add(h, rate)

    def looped(self, h: Any) -> Any:
        """Adds the sum over a loop of three turns, from its own arrays."""
        main = fluid.default_main_program()
        total = layers.fill_constant([1], "float32", 0.0)
        total.stop_gradient = True
        limit = layers.fill_constant([1], "float32", 2.5)
        going = layers.less_than(total, limit)
        inner = main._create_block()
        more = layers.scale(layers.scale(layers.scale(total, 2.0), 0.5), 1.0, bias=1.0)
        layers.assign(more, total)
        block = main.current_block()
        block.append_op("less_than", {"X": total, "Y": limit}, {"Out": going})
        main._rollback()
        main.current_block().append_op(
            "while",
            {"Condition": going, "X": [total, limit, going]},
            {"Out": [total, going]},
            {"sub_block": inner},
        )
        return layers.elementwise_add(h, layers.scale(total, 0.1))

    def renamed(self, h: Any) -> Any:
        """Adds a variable that is written twice, as in scripts that assign to it."""
        kept = layers.fill_constant([1], "float32", 0.5)
        kept.stop_gradient = True
        twice = layers.scale(layers.scale(kept, 2.0), 0.3)
        more = layers.elementwise_add(h, kept)
        layers.assign(twice, kept)
        return layers.elementwise_add(more, layers.scale(kept, 0.7))


def built(drawn: random.Random) -> tuple[fluid.Program, fluid.Program, Any, Any]:
    with fresh() as (main, startup):
        main.random_seed = startup.random_seed = 5
        loss, out = Net(drawn).build()
    return main, startup, loss, out


def losses(main: fluid.Program, startup: fluid.Program, fetch: list[Any]) -> list[Any]:
    """Returns the fetches of two steps, and the parameters after them."""
    exe, scope = fluid.Executor(fluid.CPUPlace()), fluid.Scope()
    exe.run(startup, scope=scope)
    found = [x for fed in FEEDS for x in exe.run(main, fed, fetch, scope=scope)]
    return [*found, *(np.array(scope.peek(p.name)) for p in main.all_parameters())]


@pytest.mark.grid
@given(st.randoms(use_true_random=False), st.sampled_from([0, 1]), st.data())
@settings(max_examples=25)
def test_operators_read_what_they_read_and_skipped_names_and_persistables_stay(
    drawn: random.Random, level: int, data: st.DataObject
) -> None:
    main, _, loss, _ = built(drawn)
    before = ir_program(main)
    temps = [v for v in main.global_block().vars.values() if v.name in before.root.variables]
    skip = data.draw(st.lists(st.sampled_from(temps), max_size=4, unique_by=lambda v: v.name))
    names = [loss.name, *(v.name for v in skip)]
    order = data.draw(st.permutations(["share", "release"]))
    for what in order:
        if what == "share":
            by = [v if data.draw(st.booleans()) else v.name for v in skip]
            fluid.memory_optimize(
                main, {loss, *by}, level=level, skip_grads=data.draw(st.booleans())
            )
        else:
            fluid.release_memory(main, {*names})
        check_rewritten(before, ir_program(main), level=level, skip=names)


@pytest.mark.grid
@given(st.randoms(use_true_random=False), st.sampled_from([0, 1]))
@settings(max_examples=4)
def test_they_train_the_same_to_the_bit(drawn: random.Random, level: int) -> None:
    main, startup, loss, out = built(drawn)
    plain = losses(main, startup, [loss, out])
    fluid.memory_optimize(main, {loss, out.name}, level=level)
    fluid.release_memory(main, [loss.name, out.name])
    for one, other in zip(plain, losses(main, startup, [loss, out]), strict=True):
        np.testing.assert_array_equal(one, other)
