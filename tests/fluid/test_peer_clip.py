"""Cases of fluid's own tests on clipping by parameter and `ref_by_trainer_id`."""

from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from tests.fluid.nets import fresh
from tests.fluid.test_peer_transpiler import A, B, Job


def clipped_where_declared() -> Job:
    """Returns the standard net's job, in which only `fc_w` declares L2 decay and clipping."""

    class Declared(fluid.optimizer.SGD):
        def minimize(self, loss: fluid.Variable, *args: Any, **more: Any) -> Any:
            clip = fluid.clip.GradientClipByValue(0.1)
            fluid.clip.set_gradient_clip(clip, param_list=["fc_w"])
            return super().minimize(loss, *args, **more)

    attr = fluid.ParamAttr(name="fc_w", regularizer=fluid.regularizer.L2Decay(0.01))
    return Job(optimizer=lambda: Declared(0.1), param_attr=attr)


def updates(server: fluid.Program) -> list[list[str]]:
    """Returns the operators of each block but the first."""
    return [[op.type for op in block.ops] for block in server.blocks[1:]]


def test_only_the_declared_parameter_is_clipped() -> None:
    """Up to 1.6 fluid clipped `fc_b` too, by the last parameter's declaration."""
    (clip,) = (
        op for op in clipped_where_declared().trainer.global_block().ops if op.type == "clip"
    )
    assert clip.input("X") == ["fc_w@GRAD"]


def test_clipping_stays_on_trainers_and_decay_moves_to_servers() -> None:
    job = clipped_where_declared()
    ops = job.trainer.global_block().ops
    assert [op.type for op in ops[11:15]] == ["mul_grad", "clip", "split_byref", "send"]
    assert ops[12].attr("op_role") == 1
    assert ops[13].input("X") == ["clip_0.tmp_0"]
    assert ops[14].input("X") == [f"clip_0.tmp_0.block{at}.trainer_0" for at in (0, 1)]
    decayed, plain = ["sum", "scale", "scale", "sum", "sgd"], ["sum", "scale", "sgd"]
    first, second = (
        [[op.type for op in b.ops] for b in job.server(ep).blocks[1:]] for ep in (A, B)
    )
    assert sorted(first) == [decayed, plain]
    assert second == [decayed]


@pytest.mark.parametrize("trainer", [0, 8])
def test_ref_by_trainer_id_selects_the_trainers_input(trainer: int) -> None:
    with fresh() as (main, _):
        copies = [fluid.data(f"x{at}", [10, 10]) for at in range(10)]
        number = fluid.data("number", [1], dtype="int64")
        block = main.global_block()
        out = block.create_var(name="out", shape=[10, 10], dtype="float32")
        read: dict[str, Any] = {"X": copies, "TrainerId": number}
        block.append_op("ref_by_trainer_id", inputs=read, outputs={"Out": out})
    random = np.random.default_rng(0)
    feed = {x.name: random.normal(size=(10, 10)).astype(np.float32) for x in copies}
    feed["number"] = np.array([trainer])
    (found,) = fluid.Executor().run(main, feed=feed, fetch_list=[out], scope=fluid.Scope())
    np.testing.assert_array_equal(found, feed[f"x{trainer}"])
