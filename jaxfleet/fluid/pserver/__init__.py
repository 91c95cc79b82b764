"""Runs what `DistributeTranspiler` writes for parameter servers, over the runtime of `jaxfleet.ps`.

A transpiled program is fluid's text: a trainer's with `send`, `send_barrier`, `recv`, `fetch_barrier` and `concat`, a
server's with `listen_and_serv` and a block for each update. The runtime knows the same operators with less around
them, so a program is first made plain (`programs.py`): control variables go, since the order of operators says what
they said; a server's gradients and whatever else each step makes anew become temporaries.

**A server** (`serving.py`). `exe.run(main)` reads the program into a plan as any server of ours does, takes the state
from the scope, where the server's startup program has put it, compiles all blocks, and serves until all trainers have
closed. Then what it holds is in the scope. It defines and assigns itself; a trainer's hello says the hash of the
job's program, which must be the server's. Gradients are added in the trainers' order.

**A trainer** (`connections.py`, `training.py`). The first operator that needs servers says hello to all; which trainer
of how many, of which servers, the transpiler wrote into the program. What lies between such operators is compiled as
one, and sends move to its end, as `jf.distribute` has them.

| in the program | is |
| --- | --- |
| `send` | `push` of the gradient, without `.trainer_<id>`: a bare name from one trainer is the same message |
| `send_barrier`, `fetch_barrier` | nothing: a value is asked for as of a step, and no server has it before all sent |
| `recv` | `pull` as of the present step; of a startup program, of the step that servers are at |
| `concat` of what came | rows that come where they belong, so nothing is joined |
| `checkpoint_notify` | a save of each server's rows of a table, and then the list of all parts |
| `exe.close()` | `bye` |

A program that sends is a step; one that only receives is none. So a trainer's startup program may run again, and
brings what servers have then.

**Who ends early.** A trainer that closed is no longer waited for; its gradients are zeros, and the others' are still
divided by the number of trainers, as in fluid. A script that ends without `close` closes; one that ends by an error
does not, and the others learn that it was lost.

**Deadlines.** `FLAGS_rpc_deadline` (milliseconds, 180000) is how long anyone waits for servers to come, and for a step
of peers that live. A peer without a heartbeat for ten seconds is lost. Errors name it, and the step.

What cannot be run as it is written is refused before anything is sent (`refusals.py`).
"""  # noqa: E501  # a table's row is one line

from jaxfleet.fluid.pserver.notices import TABLES as TABLES
from jaxfleet.fluid.pserver.refusals import why_not as why_not
from jaxfleet.fluid.pserver.runs import PserverRuns as PserverRuns
from jaxfleet.fluid.pserver.runs import begins_rows as begins_rows
from jaxfleet.fluid.pserver.runs import refuse_several_devices as refuse_several_devices
from jaxfleet.fluid.pserver.runs import talks_to_others as talks_to_others
