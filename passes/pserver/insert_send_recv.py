"""Divides a step between trainers and parameter servers: the program of one of them."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxfleet.analysis.optimizer_groups import find_optimizer_groups
from jaxfleet.analysis.placement.sliced_layout import endpoints_of, placement_of, slices_of
from jaxfleet.analysis.updates import Updates, is_fluid_dialect
from jaxfleet.errors import PassError
from jaxfleet.ir import Operator, Program
from jaxfleet.passes.fluid.job import ExchangeMode, FluidJob
from jaxfleet.passes.fluid.server_program import fluid_server
from jaxfleet.passes.fluid.trainer_program import fluid_trainer
from jaxfleet.passes.pserver.job import CommunicationMode, PServerJob
from jaxfleet.passes.pserver.local_update import local_update_server, local_update_trainer
from jaxfleet.passes.pserver.server_program import server_program
from jaxfleet.passes.pserver.server_split import ServerSplit
from jaxfleet.passes.pserver.trainer_program import trainer_program
from jaxfleet.passes.pserver.trainer_split import (
    TrainerSplit,
    check_async_is_possible,
    check_updates_are_separable,
)
from jaxfleet.pipeline import Pass, made_by, register_pass


@register_pass("insert_send_recv")
@dataclass(frozen=True)
class InsertSendRecv(Pass):
    """Writes a trainer's program, or a server's.

    A trainer's program is the step without its optimize section: instead of completing the sum of a
    gradient, the trainer sends its summand (`split_byref`, `send`); at the end it waits
    (`send_barrier`) and receives the parameters (`recv`, `fetch_barrier`, `concat`). A server's
    program has `listen_and_serv`, and a block for each slice placed there. A program in fluid's
    dialect is divided as in fluid: trainers send gradients of their own rows, and servers take the
    mean.

    Before::

        program p {endpoints=["s:1", "s:2"], placement=[["b", "s:1"], ["w.block0", "s:2"], ["w.block1", "s:1"]], slices=[["b", [3]], ["w", [2, 2]]]}
          data  x: f32[4,3]
          param b: f32[3]
          param w: f32[4,3]
          block 0
            backward
              b@GRAD: f32[3] = jax.reduce_sum(x) {axes=[0]} for (b, b@GRAD)
              w@GRAD: f32[4,3] = jax.neg(x) for (w, w@GRAD)
            optimize
              b = jax.sub(b, b@GRAD)
              w = jax.sub(w, w@GRAD)

    After::

        program p.trainer0 {endpoints=["s:1", "s:2"], role="trainer", trainers=1}
          data  x: f32[4,3]
          param b: f32[3]
          param w: f32[4,3]
          block 0
            backward
              b@GRAD: f32[3] = jax.reduce_sum(x) {axes=[0]} for (b, b@GRAD)
            rpc
              send(X=b@GRAD) {epmap=["s:1"]} for (b, b@GRAD)
            backward
              w@GRAD: f32[4,3] = jax.neg(x) for (w, w@GRAD)
            dist
              Out=[w@GRAD.block0: f32[2,3], w@GRAD.block1: f32[2,3]] = split_byref(X=w@GRAD) {sections=[2, 2]}
            rpc
              send(X=[w@GRAD.block0, w@GRAD.block1]) {epmap=["s:2", "s:1"]} for (w, w@GRAD)
              send_barrier() {endpoints=["s:1", "s:2"], trainer_id=0}
              Out=b = recv() {epmap=["s:1"], trainer_id=0}
              Out=[w.block0: f32[2,3], w.block1: f32[2,3]] = recv() {epmap=["s:2", "s:1"], trainer_id=0}
              fetch_barrier() {endpoints=["s:1", "s:2"], trainer_id=0}
            dist
              Out=w = concat(X=[w.block0, w.block1]) {axis=0}
    """  # noqa: E501  # a program's attributes are one line

    trainer_id: int = 0  # the trainer whose program is written
    server: int = -1  # the server whose program is written instead; -1: a trainer's
    trainers: int = 1
    mode: str = "sync"  # or async, half_async; for a captured step also geo, dc_asgd, fl
    staleness: int = 0  # except for sync: the staleness bound in steps
    merge: int = 1  # async, half_async: the most gradients in one message
    k_steps: int = 1  # geo, fl: steps between exchanges
    compensation: float = 1.0  # dc_asgd: the factor of the correction
    by_rows: bool = False  # fl: the average is weighted by rows instead of trainers
    runtime_split: bool = False  # the sender and the receiver split and join, without operators
    local_barrier: bool = False  # a trainer waits until its sends have completed

    runs_after = ("grad_allreduce", "slice_var", "dispatch", "clip_on_trainers")

    def run(self, program: Program) -> Program:
        if "role" in program.attrs:
            raise PassError(f"insert_send_recv: the program is already a {program.attrs['role']}'s")
        endpoints = endpoints_of(program)
        if not -1 <= self.server < len(endpoints):
            raise PassError(f"insert_send_recv: server {self.server} of {len(endpoints)}")
        if not 0 <= self.trainer_id < self.trainers:
            what = f"insert_send_recv: trainer {self.trainer_id} of {self.trainers}"
            raise PassError(what)
        if is_fluid_dialect(program):
            exchange = ExchangeMode(self.mode, self.runtime_split, self.local_barrier)
            return self._in_fluids_dialect(program, exchange)
        if self.runtime_split or self.local_barrier:
            what = "insert_send_recv: runtime_split and local_barrier are for fluid's dialect"
            raise PassError(what, hint="leave them out for a captured step")
        mode = CommunicationMode(
            self.mode, self.staleness, self.merge, self.k_steps, self.compensation, self.by_rows
        )
        return self._divided(program, mode)

    def _in_fluids_dialect(self, program: Program, exchange: ExchangeMode) -> Program:
        updates = Updates(program)
        summed = frozenset(gradient for _, gradient in updates.pairs)
        job = self._job(program, CommunicationMode(), summed=summed)
        fluid = FluidJob(updates, job, exchange)
        if self.server >= 0:
            return fluid_server(fluid, job.endpoints[self.server], self._mark)
        return fluid_trainer(fluid, self.trainer_id, self._mark)

    def _job(
        self,
        program: Program,
        mode: CommunicationMode,
        *,
        summed: frozenset[str] = frozenset(),
        exports: Mapping[str, tuple[str, ...]] | None = None,
    ) -> PServerJob:
        endpoints, slices = endpoints_of(program), slices_of(program)
        placement = placement_of(program)
        return PServerJob(self.trainers, endpoints, slices, placement, summed, exports or {}, mode)

    def _divided(self, program: Program, mode: CommunicationMode) -> Program:
        if mode.updates_on_trainers:
            local = self._job(program, mode)
            if self.server >= 0:
                return local_update_server(program, local, local.endpoints[self.server], self._mark)
            return local_update_trainer(program, local, self.trainer_id, self._mark)
        groups = find_optimizer_groups(program)
        if not mode.is_sync:
            check_updates_are_separable(groups)
        bodies = ServerSplit(groups)
        work = TrainerSplit(bodies)
        job = self._job(program, mode, summed=work.summed, exports=work.exports)
        if not mode.is_sync:
            check_async_is_possible(bodies, work)
        if self.server >= 0:
            return server_program(bodies, job, job.endpoints[self.server], self._mark)
        return trainer_program(bodies, job, work, self.trainer_id, self._mark)

    def _mark(self, op: Operator) -> Operator:
        return made_by(op, self)
