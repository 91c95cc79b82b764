"""FLDistributeTranspiler: trainers train by themselves, and servers average what they made.

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
from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.from_ir import write_back
from jaxfleet.fluid.operator import ROLE_VAR
from jaxfleet.fluid.program import Program
from jaxfleet.fluid.to_ir import ir_program
from jaxfleet.fluid.transpiler.config import DistributeTranspilerConfig
from jaxfleet.fluid.transpiler.details.vars_distributed import VarsDistributed
from jaxfleet.fluid.transpiler.distribute_transpiler import DistributeTranspiler
from jaxfleet.fluid.transpiler.pserver import PServerJob
from jaxfleet.fluid.transpiler.registry import registry_of
from jaxfleet.fluid.variable import Variable
from jaxfleet.ir import Program as IrProgram
from jaxfleet.passes import FlAverage
from jaxfleet.passes.fl_average import SAMPLES, SPLIT_NUM, receiving


@dataclass(frozen=True)
class _FlJob(PServerJob):
    """Makes the programs of a job whose trainers update.

    Attributes:
        weighted: parameters count by the number of samples that they were trained with.
    """

    weighted: bool = False

    def trainer(self, trainer_id: int) -> IrProgram:
        send = FlAverage(trainer_id=trainer_id, trainers=self.trainers, weighted=self.weighted)
        return self._run(self.placed, send)

    def server(self, endpoint: str) -> IrProgram:
        number = self.endpoints.index(endpoint)
        serve = FlAverage(server=number, trainers=self.trainers, weighted=self.weighted)
        return self._run(self.placed, serve)

    def registry(self) -> VarsDistributed:
        return registry_of(self.main, self.placed, has_state=False)

    @property
    def slices(self) -> bool:
        return False


class FLDistributeTranspiler(DistributeTranspiler):
    """Transpiles a program for trainers whose parameters are averaged.

    Args:
        config: what is asked for; its slicing is not done, since parameters travel whole.
        weighted: a trainer's parameters count by the number of samples that it feeds to
            `send_program` under the name `samples`; else all count alike.
    """

    def __init__(
        self, config: DistributeTranspilerConfig | None = None, *, weighted: bool = False
    ) -> None:
        super().__init__(config)
        self.weighted = weighted
        self._cut: dict[str, Program] = {}

    @property
    def split_num(self) -> int:
        """How many operators of the trainer's program train; those that follow send."""
        count = self._transpiled()[1]._facts[SPLIT_NUM]
        assert isinstance(count, int)
        return count

    @property
    def samples(self) -> str:
        """The name that `send_program` is fed the number of samples under, as float32[1]."""
        number = self._transpiled()[1]._facts["trainer_id"]
        return f"{SAMPLES}.trainer_{number}"

    @property
    def _opti_to_param(self) -> dict[str, str]:
        """Names of parameters by those of the copies that are sent."""
        return self._sent(self._transpiled()[1])

    @staticmethod
    def _sent(main: Program) -> dict[str, str]:
        ops = main.global_block().ops
        sent = (op.attr(ROLE_VAR) for op in ops if op.type == "send")
        return {pair[1]: pair[0] for pair in sent if pair}

    @property
    def _opti_var_list(self) -> list[str]:
        """Names of the copies of parameters that are sent, in order."""
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
        """What receives, at the beginning of a round, what servers made of the last."""
        return self._once("recv", lambda main: _written(main, receiving(ir_program(main))))

    @property
    def train_program(self) -> Program:
        """What trains: the trainer's program up to `split_num`."""
        return self._once("train", lambda main: _part(main, slice(None, self.split_num)))

    @property
    def send_program(self) -> Program:
        """What sends, at the end of a round: the trainer's program from `split_num` on."""
        return self._once("send", lambda main: _part(main, slice(self.split_num, None)))

    def _once(self, name: str, make: Callable[[Program], Program]) -> Program:
        """Returns a program that is made when it is first asked for."""
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
        """Returns what makes the programs of the job.

        Raises:
            StrategyError: servers are not to wait for all trainers.
        """
        if not is_sync:
            what = "sync_mode=False: a server averages what all trainers of a round have made"
            hint = "leave sync_mode=True; GeoSgdTranspiler is for trainers that wait for nobody"
            raise mistake(f"{what}, and so waits for them", hint, StrategyError)
        return _FlJob(main, startup, self.config, endpoints, trainers, is_sync, self.weighted)


def _part(main: Program, which: slice) -> Program:
    """Returns some of a program's operators, with what they need."""
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
