"""Small steps, and their programs for trainers and servers, as text."""

from jaxfleet.ir import Program, parse, verify
from jaxfleet.passes import Dispatch, InsertSendRecv, SliceVar
from jaxfleet.pipeline import run_pipeline

# A captured step after grad_allreduce: the two gradients and the metric are summed over trainers.
# The step's learning rate depends on a counter; one parameter has a momentum.
STEP = """
program mlp
  data  x: f32[b,3]
  param b1: f32[2]
  param w1: f32[4,3]
  state count: i32[]
  state m: f32[4,3]
  block 0
    forward
      total: f32[] = jax.reduce_sum(x) {axes=[0, 1]}
      total = c_allreduce_sum(total)
    backward
      b1@GRAD: f32[2] = jax.broadcast_in_dim(total) {shape=[2], broadcast_dimensions=[], sharding=none}
      b1@GRAD = c_allreduce_sum(b1@GRAD) for (b1, b1@GRAD)
      row: f32[3] = jax.reduce_sum(x) {axes=[0]}
      w1@GRAD: f32[4,3] = jax.broadcast_in_dim(row) {shape=[4,3], broadcast_dimensions=[1], sharding=none}
      w1@GRAD = c_allreduce_sum(w1@GRAD) for (w1, w1@GRAD)
    lr_sched
      count = jax.add(count, 1:i32)
      rate: f32[] = jax.convert_element_type(count) {new_dtype=f32, weak_type=false, sharding=none}
    optimize
      b1s: f32[2] = jax.mul(b1@GRAD, rate)
      b1 = jax.sub(b1, b1s)
      m = jax.add(m, w1@GRAD)
      w1s: f32[4,3] = jax.mul(m, rate)
      w1 = jax.sub(w1, w1s)
      fetch(total)
"""  # noqa: E501  # an operator is a line

# The same as captured.
UNDIVIDED = "\n".join(
    line
    + (
        f" for ({name[:2]}, {name})"
        if (name := line.split(":")[0].strip()).endswith("@GRAD")
        else ""
    )
    for line in STEP.splitlines()
    if "c_allreduce" not in line
)

ENDPOINTS = ("s:1", "s:2")


def placed(
    text: str = STEP, endpoints: tuple[str, ...] = ENDPOINTS, *, min_block_size: int = 4
) -> Program:
    """Returns a step whose parameters are sliced and placed."""
    program = parse(text)
    verify(program)
    cut = SliceVar(servers=len(endpoints), min_block_size=min_block_size)
    return run_pipeline(program, [cut, Dispatch(endpoints=endpoints, max_imbalance=0)])


def trainer_of(program: Program, trainer: int = 0, *, trainers: int = 2) -> Program:
    return _checked(InsertSendRecv(trainers=trainers, trainer_id=trainer).run(program))


def server_of(program: Program, server: int = 0, *, trainers: int = 2) -> Program:
    return _checked(InsertSendRecv(trainers=trainers, server=server).run(program))


def _checked(program: Program) -> Program:
    verify(program)
    assert parse(str(program)) == program
    return program
