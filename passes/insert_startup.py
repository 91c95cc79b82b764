"""Write the startup program of a trainer or a server: where the state of a job begins."""

from dataclasses import dataclass

from jaxfleet.analysis.slices import endpoints_of
from jaxfleet.analysis.updates import says_by_roles
from jaxfleet.errors import PassError
from jaxfleet.ir import Operator, Program
from jaxfleet.passes._fluid_startup import fluid_server_startup, fluid_trainer_startup
from jaxfleet.passes._startup import server_startups, trainer_startup
from jaxfleet.passes.insert_send_recv import InsertSendRecv
from jaxfleet.pipeline import Pass, made_by, register_pass


@register_pass("insert_startup")
@dataclass(frozen=True)
class InsertStartup(Pass):
    """Writes a trainer's startup program, or a server's.

    Trainer 0 gives the state that it begins with to servers: it cuts what they hold in slices
    (`split_byref`), sends everything, and waits until all have it (`send_barrier`). Then every
    trainer receives what its own program reads (`recv`, `fetch_barrier`, `concat`), so that all
    go on with the same. A server receives the variables of its program; the first one keeps what
    is the trainers' own besides.

    In fluid's dialect it is run on the step's startup program, with the attributes (and variables)
    of the program that it belongs to: each side begins its variables by itself, and trainers then
    receive what servers have.

    Before::

        program p {endpoints=["s:1", "s:2"], placement=[["b", "s:1"], ["w.block0", "s:2"], ["w.block1", "s:1"]], slices=[["b", [3]], ["w", [2, 2]]]}
          data  x: f32[4,3]
          param b: f32[3]
          param w: f32[4,3]
          state m: f32[4,3]
          state seen: i32[]
          block 0
            forward
              seen = jax.add(seen, 4:i32)
            backward
              b@GRAD: f32[3] = jax.reduce_sum(x) {axes=[0]} for (b, b@GRAD)
              w@GRAD: f32[4,3] = jax.neg(x) for (w, w@GRAD)
            optimize
              b = jax.sub(b, b@GRAD)
              m = jax.add(m, w@GRAD)
              w = jax.sub(w, m)

    After::

        program p.trainer0.startup {endpoints=["s:1", "s:2"], role="trainer", trainers=1}
          param b: f32[3]
          param w: f32[4,3]
          state m: f32[4,3]
          state seen: i32[]
          block 0
            rpc
              send(X=b) {epmap=["s:1"]}
            dist
              Out=[w.block0: f32[2,3], w.block1: f32[2,3]] = split_byref(X=w) {sections=[2, 2]}
            rpc
              send(X=[w.block0, w.block1]) {epmap=["s:2", "s:1"]}
            dist
              Out=[m.block0: f32[2,3], m.block1: f32[2,3]] = split_byref(X=m) {sections=[2, 2]}
            rpc
              send(X=[m.block0, m.block1]) {epmap=["s:2", "s:1"]}
              send(X=seen) {epmap=["s:1"]}
              send_barrier() {endpoints=["s:1", "s:2"], trainer_id=0}
              Out=b = recv() {epmap=["s:1"], trainer_id=0}
              Out=[w.block0, w.block1] = recv() {epmap=["s:2", "s:1"], trainer_id=0}
              Out=seen = recv() {epmap=["s:1"], trainer_id=0}
              fetch_barrier() {endpoints=["s:1", "s:2"], trainer_id=0}
            dist
              Out=w = concat(X=[w.block0, w.block1]) {axis=0}
    """  # noqa: E501  # a program's attributes are one line

    trainer_id: int = 0  # whose program, of the trainers
    server: int = -1  # the server whose program is written instead; -1 for a trainer's
    trainers: int = 1

    runs_after = ("grad_allreduce", "slice_var", "dispatch")

    def run(self, program: Program) -> Program:
        if says_by_roles(program):
            write = fluid_server_startup if "pserver_id" in program.attrs else fluid_trainer_startup
            return write(program, self._mark)
        if "role" in program.attrs:
            what = f"insert_startup: the program is already a {program.attrs['role']}'s"
            raise PassError(what, hint="run it on the step, in the place of insert_send_recv")
        count = len(endpoints_of(program))
        if not -1 <= self.server < count:
            raise PassError(f"insert_startup: server {self.server} of {count}")
        trainer = InsertSendRecv(self.trainer_id, trainers=self.trainers).run(program)
        servers = [InsertSendRecv(server=n, trainers=self.trainers).run(program)
                   for n in range(count)]  # fmt: skip
        startups = server_startups(program, servers, self._mark)
        if self.server >= 0:
            return startups[self.server]
        return trainer_startup(
            program, trainer, startups, trainer_id=self.trainer_id, mark=self._mark
        )

    def _mark(self, op: Operator) -> Operator:
        return made_by(op, self)
