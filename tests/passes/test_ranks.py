"""Programs of ranks: placement and rings of collectives, and rejections."""

import pytest

from jaxfleet.errors import PassError
from jaxfleet.ir import Program, parse
from jaxfleet.passes import (
    BroadcastParams,
    CommInit,
    GenNcclId,
    GradAllreduceByRole,
    LocalSGD,
    SnapshotParams,
)
from jaxfleet.pipeline import Pass, run_pipeline

STEP = parse("""
program p
  data  x: f32[b,3]
  data  g: f32[1]
  param a: f32[3]
  param b: f32[3]
  param c: f32[3]
  state rate: f32[1]
  block 0
    backward|loss
      Out=loss@GRAD: f32[1] = fill_constant() {shape=[1], value=1.0}
    backward
      Out=c@GRAD: f32[3] = first(X=x) for (c, c@GRAD)
      Out=[a@GRAD: f32[3], b@GRAD: f32[3]] = second(X=x) for (a, a@GRAD), (b, b@GRAD)
    optimize
      Out=c@GRAD = clip(X=c@GRAD) {max=1.0, min=-1.0}
      ParamOut=a = sgd(Grad=a@GRAD, LearningRate=rate, Param=a)
      ParamOut=b = sgd(Grad=b@GRAD, LearningRate=rate, Param=b)
      ParamOut=c = sgd(Grad=c@GRAD, LearningRate=rate, Param=c)
""")
STARTUP = parse("""
program startup
  param a: f32[3]
  param b: f32[3]
  param c: f32[3]
  block 0
    forward
      Out=a = uniform_random() {shape=[3]}
      Out=b = uniform_random() {shape=[3]}
      Out=c = uniform_random() {shape=[3]}
""")


def told(program: Program) -> list[str]:
    """Returns the operators between ranks, with their variables and rings."""
    found = []
    for op in program.root.ops:
        if op.type.startswith("c_"):
            ring = op.attrs.get("ring_id", "")
            found.append(f"{op.type}({', '.join(op.reads)}) {ring}".strip())
    return found


def after(program: Program, *passes: Pass) -> Program:
    return run_pipeline(program, passes)


def test_rings_are_dealt_out_from_the_last_gradient_and_one_wait_serves_an_operator() -> None:
    made = after(STEP, GradAllreduceByRole(nranks=4, nrings=2))
    assert told(made) == [
        "c_sync_calc_stream(c@GRAD)",
        "c_allreduce_sum(c@GRAD) 0",
        "c_sync_calc_stream(a@GRAD)",
        "c_allreduce_sum(b@GRAD) 1",
        "c_allreduce_sum(a@GRAD) 0",
        "c_sync_comm_stream(c@GRAD) 0",
        "c_sync_comm_stream(c@GRAD) 1",
    ]
    types = [op.type for op in made.root.ops]
    assert types[:2] == ["fill_constant", "scale"]
    assert made.root.ops[1].attrs["scale"] == 0.25
    assert types[types.index("clip") - 1] == "c_sync_comm_stream"


def test_a_gradient_that_two_operators_name_is_summed_after_the_last() -> None:
    made = after(
        parse("""
        program p
          data  x: f32[b,3]
          param a: f32[3]
          block 0
            backward
              Out=a@GRAD: f32[3] = first(X=x) for (a, a@GRAD)
              Out=a@GRAD = clip(X=a@GRAD) for (a, a@GRAD)
        """),
        GradAllreduceByRole(),
    )
    assert [op.type for op in made.root.ops] == [
        *("first", "clip", "c_sync_calc_stream", "c_allreduce_sum"),
    ]


def test_a_gradient_of_a_block_that_may_not_run_is_refused() -> None:
    program = parse("""
    program p
      data  x: f32[3]
      data  is_due: bool[1]
      param a: f32[3]
      state g: f32[3]
      block 0
        backward
          Out=g = conditional_block(Cond=is_due, Input=[x, g]) {sub_block=^1}
      block 1 in 0
        backward
          Out=g = scale(X=x) for (a, g)
    """)
    with pytest.raises(PassError, match="a gradient is finished in a sub-block"):
        GradAllreduceByRole().run(program)


@pytest.mark.parametrize("pass_", [GradAllreduceByRole(skip=("b",)), LocalSGD(skip=("b",))])
def test_what_each_rank_has_rows_of_does_not_travel(pass_: Pass) -> None:
    made = after(STEP, pass_)
    summed = [op.reads[0][0] for op in made.root.ops if op.type == "c_allreduce_sum"]
    assert sorted(summed) == ["a", "c"]
    broadcast = told(after(STARTUP, BroadcastParams(skip=("b",))))
    assert broadcast == ["c_broadcast(a) 0", "c_broadcast(c) 0", "c_sync_comm_stream(c) 0"]


def test_ranks_that_meet_now_and_then_do_so_in_a_block_of_their_own() -> None:
    made = after(STEP, LocalSGD(every=3))
    (meeting,) = made.blocks[1:]
    assert told(made) == []
    assert [op.type for op in made.root.ops[-6:]] == [
        *("increment", "fill_constant", "elementwise_mod", "fill_constant", "equal"),
        "conditional_block",
    ]
    assert made.root.ops[-1].blocks == (1,)
    each_time = after(STEP, LocalSGD())
    wanted = [op.type for op in each_time.root.ops if op not in STEP.root.ops]
    assert sorted(op.type for op in meeting.ops) == sorted(wanted)
    assert set(made.root.ops[-1].writes) == {f"{p}{s}" for p in "abc" for s in ("", "@SNAPSHOT")}
    begun = after(STARTUP, SnapshotParams(every=3))
    assert begun.root.ops[-1].writes == ("@LOCAL_SGD_STEPS@",)


def test_hierarchical_sums_have_handles_for_each_level_and_ring() -> None:
    made = after(STARTUP, GenNcclId(rings=2, hierarchical=True, inner=2))
    handles = [name for name in made.variables if "NCCLID" in name]
    assert handles == [
        *("NCCLID", "NCCLID_1", "Hierarchical_inter_NCCLID_0", "Hierarchical_exter_NCCLID_0"),
        *("Hierarchical_inter_NCCLID_1", "Hierarchical_exter_NCCLID_1"),
    ]


@pytest.mark.parametrize(
    ("program", "pass_", "what"),
    [
        (after(STEP, LocalSGD()), GradAllreduceByRole(), "already rewritten, as a collective's"),
        (after(STARTUP, CommInit()), CommInit(), "already rewritten, as a collective's"),
        (after(STARTUP, GenNcclId()), GenNcclId(), "knows its trainers already"),
        (STARTUP, GradAllreduceByRole(), "no operator is marked as finishing"),
        (STARTUP, LocalSGD(), "no operator updates a parameter"),
        (STEP, GradAllreduceByRole(rank=2), "rank 2 of 2"),
        (STEP, GradAllreduceByRole(nrings=0), "0 rings"),
        (STARTUP, CommInit(current="a:1"), "current is a:1, which no rank's"),
        (STARTUP, GenNcclId(rings=0), "0 rings"),
    ],
)
def test_what_cannot_be_rewritten_for_ranks(program: Program, pass_: Pass, what: str) -> None:
    with pytest.raises(PassError, match=what):
        pass_.run(program)


def test_ranks_meet_after_every_step_or_some() -> None:
    with pytest.raises(PassError, match="every 0 steps"):
        LocalSGD(every=0)
