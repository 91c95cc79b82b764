"""FLDistributeTranspiler: federated averaging of independently trained parameters.

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
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from jaxfleet.errors import StrategyError
from jaxfleet.fluid.argument_checks import mistake
from jaxfleet.fluid.framework.from_ir import write_back
from jaxfleet.fluid.framework.operator import ROLE_VAR
from jaxfleet.fluid.framework.program import Program
from jaxfleet.fluid.framework.to_ir import ir_program
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.transpiler.config import DistributeTranspilerConfig
from jaxfleet.fluid.transpiler.details.vars_distributed import VarsDistributed, vars_distributed_of
from jaxfleet.fluid.transpiler.distribute_transpiler import DistributeTranspiler
from jaxfleet.fluid.transpiler.pserver_job import PServerJob
from jaxfleet.ir import Program as IrProgram
from jaxfleet.passes import FlAverage
from jaxfleet.passes.fluid.fl_average import SAMPLES, SPLIT_NUM, receive_program


@dataclass(frozen=True)
class _FlJob(PServerJob):
    """Builds the programs of a job whose trainers update, optionally averaged by sample counts."""

    weighted: bool = False

    def trainer(self, trainer_id: int) -> IrProgram:
        send = FlAverage(trainer_id=trainer_id, trainers=self.trainers, weighted=self.weighted)
        return self._run(self.placed, send)

    def server(self, endpoint: str) -> IrProgram:
        number = self.endpoints.index(endpoint)
        serve = FlAverage(server=number, trainers=self.trainers, weighted=self.weighted)
        return self._run(self.placed, serve)

    def registry(self) -> VarsDistributed:
        return vars_distributed_of(self.main, self.placed, has_state=False)

    @property
    def slices(self) -> bool:
        return False


class FLDistributeTranspiler(DistributeTranspiler):
    """Transpiles a program for trainers whose parameters are averaged.

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

    def _job_of(
        self,
        main: Program,
        startup: Program,
        endpoints: tuple[str, ...],
        trainers: int,
        *,
        is_sync: bool,
    ) -> PServerJob:
        """Returns the builder of the job's programs; StrategyError if not synchronous."""
        if not is_sync:
            what = "sync_mode=False: a server averages what all trainers of a round have made"
            hint = "leave sync_mode=True; GeoSgdTranspiler is for trainers that wait for nobody"
            raise mistake(f"{what}, and so waits for them", hint, StrategyError)
        return _FlJob(main, startup, self.config, endpoints, trainers, is_sync, self.weighted)


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
