"""Execution of `DistributeTranspiler`'s parameter server programs by the runtime of `jaxfleet.ps`.

A transpiled program is in fluid's dialect: a trainer's has `send`, `send_barrier`, `recv`,
`fetch_barrier` and `concat`, a server's `listen_and_serv` with a block for each update. The runtime
has the same operators in a smaller dialect, so a program is normalized first (`normalization.py`):
control variables are removed, since the order of operators implies them; a server's gradients and
all other values that each step recomputes become temporaries.

**A server** (`connections.py`). `exe.run(main)` builds a server from the program, takes the state
from the scope, where the server's startup program has put it, compiles all blocks, and serves until
all trainers have closed. Its state is then written back to the scope. A trainer's hello carries the
digest of the job's program, which must equal the server's. Gradients are added in the trainers'
order.

**A trainer** (`connections.py`, `trainer.py`). The first operator that needs servers connects to
all of them; the transpiler stored the trainer's number, the number of trainers and the servers in
the program. The operators between two such operators are compiled together, and sends move to
their end, as in `jf.distribute`.

| in the program | becomes |
| --- | --- |
| `send` | `push` of the gradient, without `.trainer_<id>` in its name |
| `send_barrier`, `fetch_barrier` | nothing: a pull names its step, whose value needs all pushes |
| `recv` | `pull` at the current step; in a startup program, at the servers' step |
| `concat` of received values | nothing: rows are received in place |
| `checkpoint_notify` | each server saves its rows of a table; then the manifest is written |
| `exe.close()` | `bye` |

A program that sends is a step; one that only receives is not. So a trainer's startup program can
run again, and then fetches the servers' current values.

**Early exit.** Other trainers do not wait for one that has closed; its gradients count as zeros and
the sum is still divided by the number of trainers, as in fluid. A script that ends without `close`
closes; one that ends with an error does not, and the others report it as lost.

**Deadlines.** `FLAGS_rpc_deadline` (milliseconds, 180000) bounds the wait for servers to start, and
for a step of live peers. A peer without a heartbeat for ten seconds is lost. Errors name the peer
and the step.

A program that cannot run as written is rejected before anything is sent (`runs.py`).
"""

from jaxfleet.fluid.pserver.checkpoint_notify import TABLES as TABLES
from jaxfleet.fluid.pserver.runs import PserverRuns as PserverRuns
from jaxfleet.fluid.pserver.runs import begins_rows as begins_rows
from jaxfleet.fluid.pserver.runs import refuse_several_devices as refuse_several_devices
from jaxfleet.fluid.pserver.runs import talks_to_others as talks_to_others
from jaxfleet.fluid.pserver.runs import why_not as why_not
