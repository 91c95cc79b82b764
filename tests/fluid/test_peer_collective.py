"""Cases of fluid's own tests on nccl2 and collective modes; `peer_cases.md` lists them.

The expected startup programs come from a stand-in that appends the initializers of parameters;
fluid itself puts them first, as the recorded cases show, so here those three are sorted.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.fluid.framework.types import VarType
from tests.fluid.nets import fresh
from tests.fluid.test_peer_transpiler import FORWARD, net

A, B = "a:1", "b:1"
BEGUN = ["fill_constant", "fill_constant", "uniform_random"]


class Job:
    """The standard net of these cases, transpiled in a mode without servers."""

    def __init__(
        self,
        mode: str,
        trainers: Any = "a:1,b:1",
        *,
        rank: int = 0,
        current: str = A,
        **config: Any,
    ) -> None:
        chosen = fluid.DistributeTranspilerConfig()
        chosen.mode, chosen.wait_port = mode, False
        for name, value in config.items():
            setattr(chosen, name, value)
        self.transpiler = fluid.DistributeTranspiler(chosen)
        with fresh() as (self.main, self.startup):
            fluid.optimizer.SGD(0.1).minimize(net())
            self.before = str(self.main)
            transpile: Callable[..., Any] = self.transpiler.transpile
            self.returned = transpile(rank, trainers=trainers, current_endpoint=current)


def types(program: fluid.Program) -> list[str]:
    return [op.type for op in program.global_block().ops]


def begun(program: fluid.Program) -> list[str]:
    found = types(program)
    return [*sorted(found[:3]), *found[3:]]


def rings(program: fluid.Program, op_type: str) -> dict[str, int]:
    """Returns the ring of each variable."""
    ops = [op for op in program.global_block().ops if op.type == op_type]
    return {op.input_arg_names[0]: op.attr("ring_id") for op in ops}


def test_nccl2_adds_gen_nccl_id_to_startup() -> None:
    job = Job("nccl2", "127.0.0.1:6174,127.0.0.1:6175", current="127.0.0.1:6174")
    assert types(job.startup)[-1] == "gen_nccl_id"
    assert job.startup.global_block().has_var("NCCLID")


def test_nccl2_writes_the_trainers_into_gen_nccl_id_and_leaves_main_alone() -> None:
    job = Job("nccl2")
    op = job.startup.global_block().ops[-1]
    assert op.output("NCCLID") == ["NCCLID"]
    assert {name: op.attr(name) for name in op.all_attrs() if not name.startswith("op_")} == {
        "trainers": [A, B],
        "trainer_id": 0,
        "nccl_comm_num": 1,
        "use_hierarchical_allreduce": False,
        "hierarchical_allreduce_inter_nranks": 0,
    }
    handle = job.startup.global_block().var("NCCLID")
    assert (handle.type, handle.persistable) == (VarType.RAW, True)
    assert str(job.main) == job.before
    assert job.returned is None
    assert job.main._trainers_endpoints == [A, B]


HIERARCHICAL: Any = {"use_hierarchical_allreduce": True}


def test_hierarchical_allreduce_declares_inner_and_outer_handles() -> None:
    job = Job("nccl2", "a:1,b:1,c:1,d:1", hierarchical_allreduce_inter_nranks=2, **HIERARCHICAL)
    names = set(job.startup.global_block().vars)
    assert {"NCCLID", "Hierarchical_inter_NCCLID_0", "Hierarchical_exter_NCCLID_0"} <= names
    assert job.main._hierarchical_allreduce_inter_nranks == 2


@pytest.mark.parametrize(
    ("trainers", "inner", "what"),
    [
        ("a:1,b:1,c:1,d:1", 4, "4 trainers do not make several groups of 4"),
        ("a:1,b:1,c:1,d:1,e:1", 2, "5 trainers do not make several groups of 2"),
    ],
)
def test_trainers_that_do_not_divide_into_groups_are_refused(
    trainers: str, inner: int, what: str
) -> None:
    with pytest.raises(AssertionError, match=what):
        Job("nccl2", trainers, hierarchical_allreduce_inter_nranks=inner, **HIERARCHICAL)


def test_a_hierarchical_group_defaults_to_the_devices_of_a_process() -> None:
    job = Job("nccl2", ",".join(f"a:{n}" for n in range(16)), current="a:0", **HIERARCHICAL)
    op = job.startup.global_block().ops[-1]
    assert op.attr("hierarchical_allreduce_inter_nranks") == 8  # the tests' devices


@pytest.mark.parametrize(
    ("given", "error", "what"),
    [
        ({"rank": -1}, ValueError, "trainer_id is -1"),
        ({"current": "c:1"}, ValueError, "current_endpoint is c:1"),
        ({"trainers": [A, B]}, AssertionError, "a string of endpoints"),
    ],
)
def test_wrong_trainer_arguments_are_refused(given: Any, error: type[Exception], what: str) -> None:
    with pytest.raises(error, match=what):
        Job("nccl2", **given)


def test_grad_allreduce_startup_joins_ranks_and_broadcasts_parameters() -> None:
    job = Job("collective", collective_mode="grad_allreduce")
    told = ["c_gen_nccl_id", "c_comm_init", "c_broadcast", "c_broadcast", "c_sync_comm_stream"]
    assert begun(job.startup) == [*BEGUN, *told]
    found, joins, *_ = job.startup.global_block().ops[3:]
    assert (found.attr("rank"), found.attr("other_endpoints")) == (0, [B])
    assert [joins.attr(name) for name in ("nranks", "rank", "ring_id")] == [2, 0, 0]
    assert rings(job.startup, "c_broadcast") == {"fc_w": 0, "fc_b": 0}
    assert {op.attr("root") for op in job.startup.global_block().ops[5:7]} == {0}
    assert job.main._origin_program is not None
    assert types(job.main._origin_program) == [*FORWARD, "mul_grad", "sgd", "sgd"]


def test_two_rings_share_out_the_gradients() -> None:
    job = Job("collective", rank=1, current=B, collective_mode="grad_allreduce", nccl_comm_num=2)
    assert rings(job.main, "c_allreduce_sum") == {"fc_w@GRAD": 0, "fc_b@GRAD": 1}
    assert rings(job.startup, "c_broadcast") == {"fc_w": 0, "fc_b": 1}
    for program in (job.main, job.startup):
        assert types(program).count("c_sync_comm_stream") == 2


def test_local_sgd_averages_differences_from_snapshots() -> None:
    job = Job("collective", collective_mode="local_sgd")
    assert types(job.startup)[-2:] == ["assign", "assign"]
    copied = [op.output_arg_names[0] for op in job.startup.global_block().ops[-2:]]
    assert copied == ["fc_w@SNAPSHOT", "fc_b@SNAPSHOT"]
    met = ["sgd", "elementwise_sub", "c_sync_calc_stream", "c_allreduce_sum"]
    tail = ["c_sync_comm_stream", *["scale", "elementwise_sub", "assign"] * 2]
    assert types(job.main) == [*FORWARD, "mul_grad", *met, *met, *tail]
    meant = [op.output_arg_names[0] for op in job.main.global_block().ops[-6:]]
    assert meant == ["fc_b", "fc_b", "fc_b@SNAPSHOT", "fc_w", "fc_w", "fc_w@SNAPSHOT"]
    assert job.main.global_block().ops[-6].attr("scale") == 0.5


def test_single_process_multi_thread_sums_on_one_ring() -> None:
    job = Job("collective", A, collective_mode="single_process_multi_thread")
    assert begun(job.startup) == [*BEGUN, "c_comm_init_all"]
    assert job.startup.global_block().ops[-1].attr("ring_id") == 0
    summed = ["c_sync_calc_stream", "c_allreduce_sum"]
    divided = [*FORWARD[:6], "scale", *FORWARD[6:]]
    wanted = [*divided, *summed, "mul_grad", *summed, "c_sync_comm_stream", "sgd", "sgd"]
    assert types(job.main) == wanted
    assert job.main.global_block().ops[6].attr("scale") == 1.0


@pytest.mark.parametrize(
    ("op_type", "attrs", "wanted"),
    [
        ("c_allreduce_sum", {}, lambda one, two: [one + two, one + two]),
        ("c_broadcast", {"root": 1}, lambda _, two: [two, two]),
        ("c_allgather", {"nranks": 2}, lambda one, two: [np.concatenate([one, two])] * 2),
        ("c_reducescatter", {"nranks": 2}, lambda one, two: np.split(one + two, 2)),
    ],
)
def test_collectives_give_each_rank_its_result(op_type: str, attrs: Any, wanted: Any) -> None:
    random = np.random.default_rng(0)
    rows = [random.uniform(size=(10, 1000)).astype(np.float32) for _ in range(2)]
    with fresh() as (main, _), fluid.scope_guard(fluid.Scope()):
        x = fluid.data("x", [10, 1000])
        out = main.global_block().create_var(name="out", dtype="float32")
        main.global_block().append_op(op_type, {"X": x}, {"Out": out}, {"ring_id": 0, **attrs})
        main._facts.update(role="collective", nranks=2, rank=0)
        feed = [{"x": one} for one in rows]
        (found,) = fluid.Executor().run(main, feed, [out], return_merged=False)
    for one, two in zip(found, wanted(*rows), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-5)
