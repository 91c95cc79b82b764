"""Transpilers of jobs whose trainers update: GEO-SGD, and federated averaging."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jaxfleet.analysis.placement.sliced_layout import placement_of, slices_of
from jaxfleet.analysis.updates import Updates
from jaxfleet.errors import StrategyError
from jaxfleet.fluid.argument_checks import mistake, warn_no_effect
from jaxfleet.fluid.framework.from_ir import write_back
from jaxfleet.fluid.framework.operator import ROLE_VAR
from jaxfleet.fluid.framework.program import Program
from jaxfleet.fluid.framework.to_ir import ir_program
from jaxfleet.fluid.framework.types import VarType
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.transpiler.config import DistributeTranspilerConfig
from jaxfleet.fluid.transpiler.details.vars_distributed import VarsDistributed, vars_distributed_of
from jaxfleet.fluid.transpiler.distribute_transpiler import DistributeTranspiler
from jaxfleet.fluid.transpiler.pserver_job import PServerJob
from jaxfleet.ir import Program as IrProgram
from jaxfleet.passes import FlAverage, GeoSgd
from jaxfleet.passes.fluid.local_training import PUSH_EVERY, SAMPLES, SPLIT_NUM, receive_program
from jaxfleet.pipeline import Pass

_DEFAULT_ENDPOINT = "127.0.0.1:6174"


class _LocalJob(PServerJob, ABC):
    """Builds the programs of a job whose trainers update."""

    @abstractmethod
    def _pass(self, **process: int) -> Pass:
        """Returns the pass that writes the program of a trainer or server."""

    def trainer(self, trainer_id: int) -> IrProgram:
        return self._run(self.placed, self._pass(trainer_id=trainer_id))

    def server(self, endpoint: str) -> IrProgram:
        return self._run(self.placed, self._pass(server=self.endpoints.index(endpoint)))

    def registry(self) -> VarsDistributed:
        return vars_distributed_of(self.main, self.placed, has_state=False)


class _GeoJob(_LocalJob):
    def _pass(self, **process: int) -> Pass:
        return GeoSgd(trainers=self.trainers, **process)

    def trainer(self, trainer_id: int) -> IrProgram:
        made, every = super().trainer(trainer_id), self.config.geo_sgd_need_push_nums
        return replace(made, attrs=made.attrs.updated(**{PUSH_EVERY: every}))


class GeoSgdTranspiler(DistributeTranspiler):
    """Transpiles a program for trainers that train independently; servers sum their changes.

    ::

        config = fluid.DistributeTranspilerConfig()
        config.geo_sgd_mode, config.geo_sgd_need_push_nums = True, 100
        transpiler = fluid.transpiler.GeoSgdTranspiler(config)
        transpiler.transpile(trainer_id, pservers="10.0.0.1:6174,10.0.0.2:6174", trainers=4)

    Otherwise a script is the same as with `DistributeTranspiler`.
    """

    def transpile(
        self,
        trainer_id: int,
        program: Program | None = None,
        pservers: str = _DEFAULT_ENDPOINT,
        trainers: int | str = 1,
        sync_mode: bool = False,
        startup_program: Program | None = None,
        current_endpoint: str = _DEFAULT_ENDPOINT,
        **more: Any,
    ) -> None:
        """Rewrites a program and its startup program, in place, for one process of a job.

        `sync_mode=True` causes a warning and has no effect: trainers do not wait for each other.

        Raises:
            ProgramError: as `DistributeTranspiler.transpile`; or the exchange interval is 0.
        """
        if sync_mode:
            reason = "GeoSGD has no barriers; DistributeTranspiler has a sync mode"
            warn_no_effect("GeoSgdTranspiler.transpile(sync_mode=True)", reason)
        every = self.config.geo_sgd_need_push_nums
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            what = f"geo_sgd_need_push_nums is {every!r}, and a number of at least 1"
            raise mistake(what, "that many steps lie between two exchanges")
        super().transpile(
            trainer_id, program, pservers, trainers, False, startup_program, current_endpoint,
            **more,
        )  # fmt: skip

    def _job_of(self, **job: Any) -> PServerJob:
        return _GeoJob(**job)

    def _written(self, endpoint: str, server: IrProgram) -> Program:
        """Returns a server's program; deltas of sparse tables are rows, and are not stored."""
        made = super()._written(endpoint, server)
        block = made.global_block()
        for pair in block.ops[0].attr("sparse_grad_to_param"):
            block.var(pair.partition(":")[0]).type = VarType.SELECTED_ROWS
        return made

    def _get_vars_info(self) -> dict[str, dict[str, list[str]]]:
        """Returns the location of each parameter's slices, in the form of fluid's communicator."""
        job, _ = self._transpiled()
        sparse, placement = Updates(job.placed).prefetched, placement_of(job.placed)
        found: dict[str, dict[str, list[str]]] = {}
        for cut in slices_of(job.placed):
            info = found.setdefault(
                cut.param,
                {"var_names": [], "sections": [], "epmap": [],
                 "is_sparse": [str(cut.param in sparse)]},
            )  # fmt: skip
            info["var_names"].append(cut.name)
            info["sections"].append(str(cut.shape[0]))
            info["epmap"].append(placement[cut.name])
        return found


@dataclass(frozen=True)
class _FlJob(_LocalJob):
    weighted: bool = False  # average by sample counts

    def _pass(self, **process: int) -> Pass:
        return FlAverage(trainers=self.trainers, weighted=self.weighted, **process)

    @property
    def slices(self) -> bool:
        return False


class FLDistributeTranspiler(DistributeTranspiler):
    """Transpiles a program for federated averaging of independently trained parameters.

    ::

        transpiler = fluid.FLDistributeTranspiler()
        transpiler.transpile(trainer_id, pservers="10.0.0.1:6174", trainers=4)
        if role == "PSERVER":
            main, startup = transpiler.get_pserver_programs(current_endpoint)
            exe.run(startup)
            exe.run(main)
        else:
            exe.run(fluid.default_startup_program())
            for _ in range(rounds):
                exe.run(transpiler.recv_program)
                for batch in data:
                    exe.run(transpiler.train_program, feed=batch)
                exe.run(transpiler.send_program)
            exe.close()

    Args:
        config: the options; slicing has no effect, since parameters are sent whole.
        weighted: weight a trainer's parameters by the number of samples that it feeds to
            `send_program` as `samples`; otherwise all have the same weight.
    """

    def __init__(
        self, config: DistributeTranspilerConfig | None = None, *, weighted: bool = False
    ) -> None:
        super().__init__(config)
        self.weighted = weighted
        self._cut: dict[str, Program] = {}

    @property
    def split_num(self) -> int:
        """The number of training operators in the trainer's program; those after them send."""
        count = self._transpiled()[1]._facts[SPLIT_NUM]
        assert isinstance(count, int)
        return count

    @property
    def samples(self) -> str:
        """The feed name of the number of samples, float32[1], in `send_program`."""
        number = self._transpiled()[1]._facts["trainer_id"]
        return f"{SAMPLES}.trainer_{number}"

    @property
    def _opti_to_param(self) -> dict[str, str]:
        """Names of parameters by the names of their sent copies."""
        return self._sent(self._transpiled()[1])

    @staticmethod
    def _sent(main: Program) -> dict[str, str]:
        ops = main.global_block().ops
        sent = (op.attr(ROLE_VAR) for op in ops if op.type == "send")
        return {pair[1]: pair[0] for pair in sent if pair}

    @property
    def _opti_var_list(self) -> list[str]:
        """Names of the sent copies of parameters, in order."""
        return list(self._opti_to_param)

    @property
    def opti_name_to_send_dummy_out(self) -> dict[str, Variable]:
        """The control variable of each copy's `send`, by the copy's name."""
        block = self._transpiled()[1].global_block()
        return {
            op.attr(ROLE_VAR)[1]: block.var(op.output("Out")[0])
            for op in block.ops
            if op.type == "send" and op.attr(ROLE_VAR)
        }

    @property
    def recv_program(self) -> Program:
        """The program that receives the last round's averages at the start of a round."""
        return self._once("recv", lambda main: _written(main, receive_program(ir_program(main))))

    @property
    def train_program(self) -> Program:
        """The training part: the trainer's program up to `split_num`."""
        return self._once("train", lambda main: _part(main, slice(None, self.split_num)))

    @property
    def send_program(self) -> Program:
        """The sending part, for the end of a round: the trainer's program from `split_num` on."""
        return self._once("send", lambda main: _part(main, slice(self.split_num, None)))

    def _once(self, name: str, make: Callable[[Program], Program]) -> Program:
        """Returns a program that is created on first use."""
        _, main = self._transpiled()
        if name not in self._cut:
            self._cut[name] = make(main)
        return self._cut[name]

    def _describe(self, job: PServerJob, main: Program, trainer_id: int, table: str | None) -> None:
        super()._describe(job, main, trainer_id, table)
        copies = {param: copy for copy, param in self._sent(main).items()}
        block = main.global_block()
        self.param_grad_ep_mapping = {
            at: {
                "params": has["params"],
                "opti": [block.var(copies[p.name]) for p in has["params"]],
            }
            for at, has in self.param_grad_ep_mapping.items()
        }

    def _job_of(self, **job: Any) -> PServerJob:
        """Returns the builder of the job's programs; StrategyError if not synchronous."""
        if not job["is_sync"]:
            what = "sync_mode=False: a server averages what all trainers of a round have made"
            hint = "leave sync_mode=True; GeoSgdTranspiler has no barriers"
            raise mistake(f"{what}, and so waits for them", hint, StrategyError)
        return _FlJob(**job, weighted=self.weighted)


def _part(main: Program, which: slice) -> Program:
    """Returns a slice of a program's operators, with their variables."""
    made = ir_program(main)
    block = made.root.with_ops(made.root.ops[which])
    used = {name for op in block.ops for name in (*op.reads, *op.writes)}
    variables = {name: v for name, v in made.variables.items() if name in used}
    part = replace(made, variables=variables).with_block(block.without_unused())
    return _written(main, part)


def _written(main: Program, made: IrProgram) -> Program:
    program = write_back(Program(), made, origin=main)
    program.random_seed = main.random_seed
    program._copy_dist_param_info_from(main)
    return program
