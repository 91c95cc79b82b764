"""GeoSgdTranspiler: trainers train by themselves, and servers add up what has changed.

::

    config = fluid.DistributeTranspilerConfig()
    config.geo_sgd_mode, config.geo_sgd_need_push_nums = True, 100
    transpiler = fluid.transpiler.GeoSgdTranspiler(config)
    transpiler.transpile(trainer_id, pservers="10.0.0.1:6174,10.0.0.2:6174", trainers=4)

The rest of a script is as with `DistributeTranspiler`.
"""

from dataclasses import replace
from typing import Any

from jaxfleet.analysis.slices import placement_of, slices_of
from jaxfleet.analysis.updates import Updates
from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.dtypes import VarType
from jaxfleet.fluid.no_effect import warn_no_effect
from jaxfleet.fluid.program import Program
from jaxfleet.fluid.transpiler.details.vars_distributed import VarsDistributed
from jaxfleet.fluid.transpiler.distribute_transpiler import DistributeTranspiler
from jaxfleet.fluid.transpiler.pserver import PServerJob
from jaxfleet.fluid.transpiler.registry import registry_of
from jaxfleet.ir import Program as IrProgram
from jaxfleet.passes import GeoSgd

_PUSH_EVERY = "push_every"  # in a trainer's facts: steps from one exchange to the next
_DEFAULT_ENDPOINT = "127.0.0.1:6174"


class _GeoJob(PServerJob):
    """Makes the programs of a job whose trainers update."""

    def trainer(self, trainer_id: int) -> IrProgram:
        made = self._run(self.placed, GeoSgd(trainer_id=trainer_id, trainers=self.trainers))
        every = self.config.geo_sgd_need_push_nums
        return replace(made, attrs=made.attrs.updated(**{_PUSH_EVERY: every}))

    def server(self, endpoint: str) -> IrProgram:
        number = self.endpoints.index(endpoint)
        return self._run(self.placed, GeoSgd(server=number, trainers=self.trainers))

    def registry(self) -> VarsDistributed:
        return registry_of(self.main, self.placed, has_state=False)


class GeoSgdTranspiler(DistributeTranspiler):
    """Transpiles a program for trainers that exchange, every so many steps, what has changed."""

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

        `sync_mode=True` is warned of and changes nothing: no trainer waits for another.

        Raises:
            ProgramError: as `DistributeTranspiler.transpile` does; or an exchange comes every 0
                steps.
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
        """Returns a server's program; changes of sparse tables are rows, and nothing keeps them."""
        made = super()._written(endpoint, server)
        block = made.global_block()
        for pair in block.ops[0].attr("sparse_grad_to_param"):
            block.var(pair.partition(":")[0]).type = VarType.SELECTED_ROWS
        return made

    def _get_vars_info(self) -> dict[str, dict[str, list[str]]]:
        """Returns where the slices of each parameter lie, as fluid's communicator is told it."""
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
