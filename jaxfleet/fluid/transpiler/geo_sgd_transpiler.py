"""GeoSgdTranspiler: trainers train independently and servers sum their deltas.

::

    config = fluid.DistributeTranspilerConfig()
    config.geo_sgd_mode, config.geo_sgd_need_push_nums = True, 100
    transpiler = fluid.transpiler.GeoSgdTranspiler(config)
    transpiler.transpile(trainer_id, pservers="10.0.0.1:6174,10.0.0.2:6174", trainers=4)

Otherwise a script is the same as with `DistributeTranspiler`.
"""

from dataclasses import replace
from typing import Any

from jaxfleet.analysis.placement.sliced_layout import placement_of, slices_of
from jaxfleet.analysis.updates import Updates
from jaxfleet.fluid.argument_checks import mistake, warn_no_effect
from jaxfleet.fluid.framework.program import Program
from jaxfleet.fluid.framework.types import VarType
from jaxfleet.fluid.transpiler.details.vars_distributed import VarsDistributed, vars_distributed_of
from jaxfleet.fluid.transpiler.distribute_transpiler import DistributeTranspiler
from jaxfleet.fluid.transpiler.pserver_job import PServerJob
from jaxfleet.ir import Program as IrProgram
from jaxfleet.passes import GeoSgd

_PUSH_EVERY = "push_every"  # in a trainer's facts: steps between exchanges
_DEFAULT_ENDPOINT = "127.0.0.1:6174"


class _GeoJob(PServerJob):
    """Builds the programs of a job whose trainers update."""

    def trainer(self, trainer_id: int) -> IrProgram:
        made = self._run(self.placed, GeoSgd(trainer_id=trainer_id, trainers=self.trainers))
        every = self.config.geo_sgd_need_push_nums
        return replace(made, attrs=made.attrs.updated(**{_PUSH_EVERY: every}))

    def server(self, endpoint: str) -> IrProgram:
        number = self.endpoints.index(endpoint)
        return self._run(self.placed, GeoSgd(server=number, trainers=self.trainers))

    def registry(self) -> VarsDistributed:
        return vars_distributed_of(self.main, self.placed, has_state=False)


class GeoSgdTranspiler(DistributeTranspiler):
    """Transpiles a program for trainers that periodically exchange their changes."""

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
            reason = "trainers of GeoSGD wait for nobody; DistributeTranspiler has a sync mode"
            warn_no_effect("GeoSgdTranspiler.transpile(sync_mode=True)", reason)
        every = self.config.geo_sgd_need_push_nums
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            what = f"geo_sgd_need_push_nums is {every!r}, and a number of at least 1"
            raise mistake(what, "that many steps lie between two exchanges")
        super().transpile(
            trainer_id, program, pservers, trainers, False, startup_program, current_endpoint,
            **more,
        )  # fmt: skip

    def _job_of(
        self,
        main: Program,
        startup: Program,
        endpoints: tuple[str, ...],
        trainers: int,
        *,
        is_sync: bool,
    ) -> PServerJob:
        return _GeoJob(main, startup, self.config, endpoints, trainers, is_sync)

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
