"""A small job's programs, written by hand as `DistributeTranspiler` writes them.

`mean((x @ w + b - y)**2)` with SGD: `w` is sliced over two servers, `b` is on server 0.
"""

from jaxfleet.ir import Program, parse

ENDPOINTS = ("127.0.0.1:7101", "127.0.0.1:7102")
RATE = 0.1


def _facts(**more: object) -> str:
    said = {"endpoints": list(ENDPOINTS), **more}
    texts = {name: str(value).replace("'", '"') for name, value in sorted(said.items())}
    quoted = {n: f'"{t}"' if isinstance(said[n], str) else t for n, t in texts.items()}
    return "{" + ", ".join(f"{name}={text}" for name, text in quoted.items()) + "}"


def trainer(number: int = 0, trainers: int = 2, digest: str = "one") -> Program:
    facts = _facts(role="trainer", trainers=trainers, trainer_id=number, digest=digest)
    own = f".trainer_{number}" if trainers > 1 else ""
    a, b = ENDPOINTS
    return parse(f"""program main {facts}
      data  x: f32[b,4]
      data  y: f32[b,1]
      param w: f32[4,1]
      param b: f32[1]
      block 0
        temp w@GRAD.block0{own}: f32[2,1]
        temp w@GRAD.block1{own}: f32[2,1]
        temp w.block0: f32[2,1]
        temp w.block1: f32[2,1]
        forward
          Out=xw: f32[b,1] = mul(X=x, Y=w) {{x_num_col_dims=1, y_num_col_dims=1}}
          Out=out: f32[b,1] = elementwise_add(X=xw, Y=b) {{axis=1}}
          Out=d: f32[b,1] = elementwise_sub(X=out, Y=y) {{axis=-1}}
          Out=sq: f32[b,1] = square(X=d)
        forward|loss
          Out=loss: f32[1] = mean(X=sq)
        backward|loss
          Out=loss@GRAD: f32[1] = fill_constant() {{dtype="float32", shape=[1], value=1.0}}
        backward
          X@GRAD=sq@GRAD: f32[b,1] = mean_grad(Out@GRAD=loss@GRAD, X=sq)
          X@GRAD=d@GRAD: f32[b,1] = square_grad(Out@GRAD=sq@GRAD, X=d)
          X@GRAD=out@GRAD: f32[b,1] = elementwise_sub_grad(Out@GRAD=d@GRAD, X=out, Y=y) {{axis=-1}}
          X@GRAD=xw@GRAD: f32[b,1], Y@GRAD=b@GRAD{own}: f32[1] = elementwise_add_grad(Out@GRAD=out@GRAD, X=xw, Y=b) {{axis=1}}
        rpc
          Out=c0: f32[1] = send(X=b@GRAD{own}) {{epmap=["{a}"]}} for (b, b@GRAD)
        backward
          Y@GRAD=w@GRAD: f32[4,1] = mul_grad(Out@GRAD=xw@GRAD, X=x, Y=w) {{x_num_col_dims=1, y_num_col_dims=1}}
        dist
          Out=[w@GRAD.block0{own}, w@GRAD.block1{own}] = split_byref(X=w@GRAD) {{sections=[2, 2]}}
        rpc
          Out=c1: f32[1] = send(X=[w@GRAD.block0{own}, w@GRAD.block1{own}]) {{epmap=["{b}", "{a}"]}} for (w, w@GRAD)
          Out=c2: f32[1] = send_barrier(X=[c0, c1]) {{endpoints=["{a}", "{b}"], trainer_id={number}}}
          Out=b = recv(X=c2) {{epmap=["{a}"], trainer_id={number}}}
          Out=[w.block0, w.block1] = recv(X=c2) {{epmap=["{b}", "{a}"], trainer_id={number}}}
          Out=[b, w] = fetch_barrier(X=c2) {{endpoints=["{a}", "{b}"], trainer_id={number}}}
        dist
          Out=w = concat(X=[w.block0, w.block1]) {{axis=0}}
    """)  # noqa: E501  # an operator is one line


def trainer_startup(number: int = 0, trainers: int = 2, digest: str = "one") -> Program:
    facts = _facts(role="trainer", trainers=trainers, trainer_id=number, digest=digest)
    a, b = ENDPOINTS
    return parse(f"""program startup {facts}
      param w: f32[4,1]
      param b: f32[1]
      block 0
        temp w.block0: f32[2,1]
        temp w.block1: f32[2,1]
        forward
          Out=w = uniform_random() {{dtype="float32", max=1.0, min=-1.0, seed={number + 1}, shape=[4, 1]}}
          Out=b = fill_constant() {{dtype="float32", shape=[1], value=0.0}}
        rpc
          Out=b = recv() {{epmap=["{a}"], trainer_id={number}}}
          Out=[w.block0, w.block1] = recv() {{epmap=["{b}", "{a}"], trainer_id={number}}}
          Out=c3: f32[1] = fetch_barrier() {{endpoints=["{a}", "{b}"], trainer_id={number}}}
        forward
          Out=w = concat(X=[w.block0, w.block1]) {{axis=0}}
    """)  # noqa: E501  # an operator is one line


def server(number: int, trainers: int = 2, digest: str = "one") -> Program:
    slices = [("b", "b@GRAD", 1)] if number == 0 else []
    cut = 1 - number
    slices.append((f"w.block{cut}", f"w@GRAD.block{cut}", 2))
    shapes = {p: "f32[1]" if p == "b" else "f32[2,1]" for p, _, _ in slices}
    buffers = {p: [f"{g}.trainer_{t}" for t in range(trainers)] for p, g, _ in slices}
    facts = _facts(
        role="pserver",
        trainers=trainers,
        pserver_id=number,
        endpoint=ENDPOINTS[number],
        digest=digest,
    )
    lines = [f"program main {facts}", "  state learning_rate_0: f32[1]"]
    lines += [f"  param {p}: {shapes[p]}\n  state {g}: {shapes[p]}" for p, g, _ in slices]
    lines += ["  block 0"]
    lines += [f"    temp {name}: {shapes[p]}" for p, names in buffers.items() for name in names]
    blocks = ", ".join(f"^{at}" for at in range(1, len(slices) + 1))
    reads = ", ".join(name for names in buffers.values() for name in names)
    attrs = f"distributed_mode=0, lr_decay_block_id=-1, optimize_blocks=[{blocks}]"
    lines += ["    rpc", f"      listen_and_serv(X=[{reads}]) {{{attrs}}}"]
    rate = "learning_rate_0"
    for at, (param, grad, _) in enumerate(slices, 1):
        lines += [
            f"  block {at}",
            "    optimize",
            f"      Out={grad} = sum(X=[{', '.join(buffers[param])}]) {{use_mkldnn=false}}",
            f"      Out={grad} = scale(X={grad}) {{scale={1 / trainers}}}",
            f"      ParamOut={param} = sgd(Grad={grad}, LearningRate={rate}, Param={param})",
        ]
    return parse("\n".join(lines))
