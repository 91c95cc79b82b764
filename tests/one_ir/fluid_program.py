"""A program of fluid's operators that trains a line, with a loop and branches as sub-blocks."""

TEXT = """
program line
  data  x: f32[b,4]
  data  x_by_rows: f32[4,b]
  data  y: f32[b,1]
  param w: f32[4,1]
  param bias: f32[1]
  state lr: f32[]
  state steps: i32[]
  block 0
    lr_sched
      Out=round: i32[] = fill_constant() {dtype="int32", shape=[], value=0}
      Out=rounds: i32[] = fill_constant() {dtype="int32", shape=[], value=3}
      Out=steps = increment(X=steps) {step=1}
      Out=late: bool[] = less_than(X=rounds, Y=steps)
      Out=lr = conditional_block(Cond=late, Input=lr) {sub_block=^1}
      Out=going: bool[] = less_than(X=round, Y=rounds)
    forward
      Out=best: f32[1] = fill_constant() {dtype="float32", shape=[1], value=9.0}
      Out=[w, bias, best, round, going] = while(Condition=going, X=[HELD]) {sub_block=^2}
      fetch(best)
  block 1
    lr_sched
      Out=lr = scale(X=lr) {scale=0.5}
  block 2
    forward
      Out=h: f32[b,1] = mul(X=x, Y=w)
      Out=out: f32[b,1] = elementwise_add(X=h, Y=bias)
      Out=minus_y: f32[b,1] = scale(X=y) {scale=-1.0}
      Out=error: f32[b,1] = sum(X=[out, minus_y])
      Out=above: f32[b,1] = relu(X=error)
      Out=loss: f32[1] = mean(X=above)
      Out=better: bool[1] = less_than(X=loss, Y=best)
      Out=best = conditional_block(Cond=better, Input=[best, loss]) {sub_block=^3}
    backward
      Out=slope: f32[4,1] = mul(X=x_by_rows, Y=error)
      Out=w@GRAD: f32[4,1] = scale(X=slope) {scale=0.125}
      Out=bias@GRAD: f32[1] = mean(X=error)
    optimize
      ParamOut=w = sgd(Grad=w@GRAD, LearningRate=lr, Param=w)
      ParamOut=bias = sgd(Grad=bias@GRAD, LearningRate=lr, Param=bias)
      Out=round = increment(X=round) {step=1}
      Out=going = less_than(X=round, Y=rounds)
  block 3 in 2
    forward
      Out=best = scale(X=loss) {scale=1.0}
""".replace("HELD", "x, x_by_rows, y, w, bias, lr, best, round, rounds")
