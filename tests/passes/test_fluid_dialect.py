"""Rewrites of programs in fluid's dialect: the text of trainers' and servers' programs."""

import pytest

from jaxfleet.errors import PassError
from jaxfleet.ir import Program, parse
from jaxfleet.passes import InsertSendRecv
from jaxfleet.pipeline import parse_pipeline, run_pipeline

STEP = """
program p {dialect="fluid"}
  data  x: f32[b,4]
  param b: f32[2]
  param w: f32[4,2]
  state rate: f32[1]
  state v: f32[4,2]
  block 0
    forward
      Out=h: f32[b,2] = mul(X=x, Y=w)
    forward|loss
      Out=loss: f32[1] = mean(X=h)
    backward
      Y@GRAD=b@GRAD: f32[2] = elementwise_add_grad(Out@GRAD=h, Y=b) for (b, b@GRAD)
      Y@GRAD=w@GRAD: f32[4,2] = mul_grad(Out@GRAD=h, X=x) for (w, w@GRAD)
    optimize
      Out=decay: f32[4,2] = scale(X=w) {scale=0.5} for (w, w@GRAD)
      Out=w@GRAD = sum(X=[w@GRAD, decay]) for (w, w@GRAD)
      ParamOut=w, VelocityOut=v = momentum(Grad=w@GRAD, LearningRate=rate, Param=w, Velocity=v) {mu=0.9} for (w, w@GRAD)
      ParamOut=b = sgd(Grad=b@GRAD, LearningRate=rate, Param=b) for (b, b@GRAD)
"""  # noqa: E501  # an operator is a line

TRAINER = """
program p.trainer0 {counts_steps=false, dialect="fluid", endpoints=["s:1", "s:2"], mode="sync", on_servers=["rate", "v"], placement=[["w.block0", "s:1"], ["w.block1", "s:2"], ["b", "s:1"]], prefetched=[], role="trainer", slices=[["w", [2, 2]], ["b", [2]]], trainer_id=0, trainers=2}
  data  x: f32[b,4]
  param b: f32[2]
  param w: f32[4,2]
  block 0
    forward
      Out=h: f32[b,2] = mul(X=x, Y=w)
    forward|loss
      Out=loss: f32[1] = mean(X=h)
    backward
      Y@GRAD=b@GRAD.trainer_0: f32[2] = elementwise_add_grad(Out@GRAD=h, Y=b) for (b, b@GRAD)
    rpc
      Out=__control_var@1: raw[] = send(X=b@GRAD.trainer_0) {epmap=["s:1"], trainer_id=0} for (b, b@GRAD.trainer_0)
    backward
      Y@GRAD=w@GRAD: f32[4,2] = mul_grad(Out@GRAD=h, X=x) for (w, w@GRAD)
    dist
      Out=[w@GRAD.block0.trainer_0: f32[2,2], w@GRAD.block1.trainer_0: f32[2,2]] = split_byref(X=w@GRAD) {sections=[2, 2]}
    rpc
      Out=__control_var@0: raw[] = send(X=[w@GRAD.block0.trainer_0, w@GRAD.block1.trainer_0]) {epmap=["s:1", "s:2"], trainer_id=0} for (w, w@GRAD)
      Out=__control_var@2: raw[] = send_barrier(X=[__control_var@0, __control_var@1]) {endpoints=["s:1", "s:2"], half_async=false, trainer_id=0}
      Out=[w.block0: f32[2,2], w.block1: f32[2,2]] = recv(X=__control_var@2) {epmap=["s:1", "s:2"], trainer_id=0} for (w, w@GRAD)
      Out=b = recv(X=__control_var@2) {epmap=["s:1"], trainer_id=0} for (b, b@GRAD.trainer_0)
      Out=[w.block0, w.block1, b] = fetch_barrier(X=__control_var@2) {endpoints=["s:1", "s:2"], trainer_id=0}
    dist
      Out=w = concat(X=[w.block0, w.block1]) {axis=0}"""  # noqa: E501  # an operator is a line

SERVER = """
program p.pserver0 {counts_steps=false, dialect="fluid", endpoint="s:1", endpoints=["s:1", "s:2"], holds=[["w.block0", "w", 0], ["w@GRAD.block0", "w@GRAD", 0], ["decay", "decay", 0], ["rate", "rate", -1], ["v", "v", 0], ["b", "b", -1], ["b@GRAD", "b@GRAD", -1]], mode="sync", placement=[["w.block0", "s:1"], ["w.block1", "s:2"], ["b", "s:1"]], prefetched=[], pserver_id=0, role="pserver", slices=[["w", [2, 2]], ["b", [2]]], trainers=2}
  data  w@GRAD.block0.trainer_0: f32[2,2]
  data  w@GRAD.block0.trainer_1: f32[2,2]
  data  b@GRAD.trainer_0: f32[2]
  data  b@GRAD.trainer_1: f32[2]
  param w.block0: f32[2,2]
  param b: f32[2]
  state w@GRAD.block0: f32[2,2]
  state decay: f32[2,2]
  state rate: f32[1]
  state v: f32[2,2]
  state b@GRAD: f32[2]
  block 0
    rpc
      listen_and_serv(X=[w@GRAD.block0.trainer_0, w@GRAD.block0.trainer_1, b@GRAD.trainer_0, b@GRAD.trainer_1]) {Fanin=2, distributed_mode=0, endpoint="s:1", grad_to_block_id=["w@GRAD.block0:1", "b@GRAD:2"], lr_decay_block_id=-1, optimize_blocks=[^1, ^2], pserver_id=0, rpc_get_thread_num=12, rpc_prefetch_thread_num=12, rpc_send_thread_num=12, sparse_grad_to_param=[]}
  block 1
    optimize
      Out=w@GRAD.block0 = sum(X=[w@GRAD.block0.trainer_0, w@GRAD.block0.trainer_1]) for (w.block0, w@GRAD.block0)
      Out=w@GRAD.block0 = scale(X=w@GRAD.block0) {scale=0.5} for (w.block0, w@GRAD.block0)
      Out=decay = scale(X=w.block0) {scale=0.5} for (w.block0, w@GRAD.block0)
      Out=w@GRAD.block0 = sum(X=[w@GRAD.block0, decay]) for (w.block0, w@GRAD.block0)
      ParamOut=w.block0, VelocityOut=v = momentum(Grad=w@GRAD.block0, LearningRate=rate, Param=w.block0, Velocity=v) {mu=0.9} for (w.block0, w@GRAD.block0)
  block 2
    optimize
      Out=b@GRAD = sum(X=[b@GRAD.trainer_0, b@GRAD.trainer_1]) for (b, b@GRAD)
      Out=b@GRAD = scale(X=b@GRAD) {scale=0.5} for (b, b@GRAD)
      ParamOut=b = sgd(Grad=b@GRAD, LearningRate=rate, Param=b) for (b, b@GRAD)"""  # noqa: E501  # an operator is a line

ASYNC_TRAINER = """
program p.trainer0 {counts_steps=false, dialect="fluid", endpoints=["s:1", "s:2"], mode="async", on_servers=["rate", "v"], placement=[["w.block0", "s:1"], ["w.block1", "s:2"], ["b", "s:1"]], prefetched=[], role="trainer", slices=[["w", [2, 2]], ["b", [2]]], trainer_id=0, trainers=2}
  data  x: f32[b,4]
  param b: f32[2]
  param w: f32[4,2]
  block 0
    forward
      Out=h: f32[b,2] = mul(X=x, Y=w)
    forward|loss
      Out=loss: f32[1] = mean(X=h)
    backward
      Y@GRAD=b@GRAD: f32[2] = elementwise_add_grad(Out@GRAD=h, Y=b) for (b, b@GRAD)
    rpc
      Out=__control_var@1: raw[] = send(X=b@GRAD) {epmap=["s:1"], sections=[2], send_varnames=["b@GRAD"], trainer_id=0} for (b, b@GRAD)
    backward
      Y@GRAD=w@GRAD: f32[4,2] = mul_grad(Out@GRAD=h, X=x) for (w, w@GRAD)
    rpc
      Out=__control_var@0: raw[] = send(X=w@GRAD) {epmap=["s:1", "s:2"], sections=[2, 2], send_varnames=["w@GRAD.block0", "w@GRAD.block1"], trainer_id=0} for (w, w@GRAD)
      Out=w = recv(X=__control_var@0) {epmap=["s:1", "s:2"], recv_varnames=["w.block0", "w.block1"], trainer_id=0} for (w, w@GRAD)
      Out=b = recv(X=__control_var@1) {epmap=["s:1"], recv_varnames=["b"], trainer_id=0} for (b, b@GRAD)"""  # noqa: E501  # an operator is a line

ASYNC_SERVER = """
program p.pserver1 {counts_steps=false, dialect="fluid", endpoint="s:2", endpoints=["s:1", "s:2"], holds=[["w.block1", "w", 2], ["w@GRAD.block1", "w@GRAD", 2], ["decay", "decay", 2], ["rate", "rate", -1], ["v", "v", 2]], mode="async", placement=[["w.block0", "s:1"], ["w.block1", "s:2"], ["b", "s:1"]], prefetched=[], pserver_id=1, role="pserver", slices=[["w", [2, 2]], ["b", [2]]], trainers=2}
  param w.block1: f32[2,2]
  state w@GRAD.block1: f32[2,2]
  state decay: f32[2,2]
  state rate: f32[1]
  state v: f32[2,2]
  block 0
    rpc
      listen_and_serv(X=w@GRAD.block1) {Fanin=2, distributed_mode=1, endpoint="s:2", grad_to_block_id=["w@GRAD.block1:1"], lr_decay_block_id=-1, optimize_blocks=[^1], pserver_id=1, rpc_get_thread_num=12, rpc_prefetch_thread_num=12, rpc_send_thread_num=12, sparse_grad_to_param=[]}
  block 1
    optimize
      Out=decay = scale(X=w.block1) {scale=0.5} for (w.block1, w@GRAD.block1)
      Out=w@GRAD.block1 = sum(X=[w@GRAD.block1, decay]) for (w.block1, w@GRAD.block1)
      ParamOut=w.block1, VelocityOut=v = momentum(Grad=w@GRAD.block1, LearningRate=rate, Param=w.block1, Velocity=v) {mu=0.9} for (w.block1, w@GRAD.block1)"""  # noqa: E501  # an operator is a line

PLACED = "slice_var{servers=2,min_block_size=4},dispatch{endpoints=[s:1,s:2]"


def written(send: str, placed: str = PLACED) -> Program:
    """Returns the step after a pipeline."""
    return run_pipeline(parse(STEP), parse_pipeline(f"{placed}}},insert_send_recv{{{send}}}"))


@pytest.mark.parametrize(
    ("send", "wanted"),
    [
        ("trainers=2", TRAINER),
        ("trainers=2,server=0", SERVER),
        ("trainers=2,mode=async,runtime_split=true", ASYNC_TRAINER),
        ("trainers=2,mode=async,runtime_split=true,server=1", ASYNC_SERVER),
    ],
)
def test_programs_read_like_fluids(send: str, wanted: str) -> None:
    made = written(send)
    assert str(made).strip() == wanted.strip()
    assert parse(str(made)) == made


def test_two_slices_on_one_server_have_state_of_their_own() -> None:
    made = written("trainers=2,server=0", f"{PLACED},given=[s:1,s:1,s:2]")
    names = [v.name for v in made.variables.values()]
    assert {"w.block0", "w.block1", "v", "v.block1", "decay", "decay.block1"} <= set(names)
    second = made.blocks[2].ops[-1]
    assert second.writes == ("w.block1", "v.block1")


def test_a_dispatcher_places_every_slice_on_a_server() -> None:
    with pytest.raises(PassError, match="given places 2 slices of 3"):
        written("trainers=2", f"{PLACED},given=[s:1,s:1]")


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(PassError, match="mode is 'later'"):
        written("mode=later")


def test_a_captured_step_is_cut_by_operators() -> None:
    with pytest.raises(PassError, match="runtime_split and local_barrier are for fluid's dialect"):
        InsertSendRecv(mode="async", runtime_split=True).run(
            parse(
                'program p {endpoints=["s:1"], placement=[["w", "s:1"]], slices=[["w", [2]]]}\n'
                "  param w: f32[2]\n  block 0\n"
            )
        )


def test_a_program_that_updates_nothing_is_refused() -> None:
    bare = STEP[: STEP.index("    optimize")]
    with pytest.raises(PassError, match="updates no parameter"):
        run_pipeline(parse(bare), parse_pipeline("slice_var{servers=2}"))
