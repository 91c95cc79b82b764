"""From a program to those of trainers and servers: which passes, with which options."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jaxfleet.analysis.slices import slices_of
from jaxfleet.analysis.updates import DIALECT, FLUID
from jaxfleet.fluid.drawing import PLACES, layer_places
from jaxfleet.fluid.program import Program
from jaxfleet.fluid.to_ir import ir_program
from jaxfleet.fluid.transpiler.config import DistributeTranspilerConfig
from jaxfleet.fluid.transpiler.details.vars_distributed import VarsDistributed
from jaxfleet.fluid.transpiler.digest import with_digest
from jaxfleet.fluid.transpiler.ps_dispatcher import HashName, PSDispatcher, RoundRobin
from jaxfleet.fluid.transpiler.registry import registry_of
from jaxfleet.fluid.transpiler.table_spec import Found, find_table
from jaxfleet.ir import Attrs, Kind
from jaxfleet.ir import Program as IrProgram
from jaxfleet.passes import (
    ClipOnTrainers,
    DcAsgd,
    Dispatch,
    InsertSendRecv,
    InsertStartup,
    PrefetchRows,
    SliceVar,
)
from jaxfleet.pipeline import Pass, Stage
from jaxfleet.runtime.dump_series import begin_series
from jaxfleet.runtime.transpile import transpile

_METHODS = {RoundRobin: "round_robin", HashName: "hash_name"}


@dataclass(frozen=True)
class PServerJob:
    """Makes the programs of a job from a step's, and touches neither.

    Attributes:
        main: the step.
        startup: what begins it.
        config: what was asked for.
        endpoints: of the servers, in order.
        trainers: how many there are.
        is_sync: whether servers wait for all trainers.
    """

    main: Program
    startup: Program
    config: DistributeTranspilerConfig
    endpoints: tuple[str, ...]
    trainers: int
    is_sync: bool

    def trainer(self, trainer_id: int) -> IrProgram:
        """Returns a trainer's program."""
        send = replace(self._exchange, trainer_id=trainer_id)
        made = self._run(self.placed, send, PrefetchRows(trainer_id))
        return replace(made, attrs=made.attrs.updated(**self.table.facts))

    def trainer_startup(self, trainer: IrProgram) -> IrProgram:
        """Returns what begins a trainer."""
        begun = ir_program(self.startup, name="startup")
        return self._run(replace(begun, attrs=_with_places(trainer.attrs, begun)), InsertStartup())

    def server(self, endpoint: str) -> IrProgram:
        """Returns a server's program."""
        send = replace(self._exchange, server=self.endpoints.index(endpoint))
        made = self._run(self.placed, send, *([DcAsgd()] if self.config.enable_dc_asgd else ()))
        return replace(made, attrs=made.attrs.updated(**self.table.facts))

    def server_startup(self, server: IrProgram, startup: Program) -> IrProgram:
        """Returns what begins a server.

        Args:
            server: its program.
            startup: what begins the step.
        """
        begun = ir_program(startup, name="startup")
        held = {v.name: v for v in server.of_kind(Kind.PARAM, Kind.STATE)}
        attrs = _with_places(server.attrs, begun)
        return self._run(
            replace(begun, variables={**begun.variables, **held}, attrs=attrs), InsertStartup()
        )

    @cached_property
    def table(self) -> Found:
        """What the step's distributed table is."""
        return find_table(self.placed, ir_program(self.startup, name="startup"))

    def registry(self) -> VarsDistributed:
        """Returns what servers hold, for whoever saves or loads it."""
        return registry_of(self.main, self.placed)

    @cached_property
    def placed(self) -> IrProgram:
        """The step, with the slices of its parameters and where they live."""
        step = ir_program(self.main)
        step = replace(step, attrs=step.attrs.updated(**{DIALECT: FLUID}))
        slicing = SliceVar(
            servers=len(self.endpoints),
            min_block_size=self.config.min_block_size,
            slice=self.slices,
        )
        note = self._stages.append
        cut, _ = transpile(step, [ClipOnTrainers(), slicing], dump_dir=None, series=note)
        made, _ = transpile(cut, [self._dispatch(cut)], dump_dir=None, series=note)
        return with_digest(made)

    @cached_property
    def _stages(self) -> list[Stage]:
        """What the passes before have done, with which the dump of each program begins."""
        return []

    @property
    def slices(self) -> bool:
        """Whether parameters are cut."""
        return self.config.slice_var_up

    def _dispatch(self, cut: IrProgram) -> Dispatch:
        method = self.config.split_method or RoundRobin
        seed = -1 if self.config.slice_var_up else self.main.random_seed
        if method in _METHODS:
            chosen = _METHODS[method]
            return Dispatch(endpoints=self.endpoints, method=chosen, shuffle_seed=seed)
        return Dispatch(endpoints=self.endpoints, given=_chosen(method, self.endpoints, cut))

    @property
    def _exchange(self) -> InsertSendRecv:
        config = self.config
        mode = "async" if config.runtime_split_send_recv else "half_async"
        return InsertSendRecv(
            trainers=self.trainers,
            mode="sync" if self.is_sync or config.completely_not_async else mode,
            runtime_split=config.runtime_split_send_recv,
            local_barrier=config.half_async and config.runtime_split_send_recv,
        )

    def _run(self, program: IrProgram, *passes: Pass) -> IrProgram:
        earlier = self._stages if program is self.placed else []
        return transpile(program, passes, dump_dir=None, series=begin_series(earlier))[0]


def _with_places(attrs: Attrs, startup: IrProgram) -> Attrs:
    """Returns attributes with what the parameters of a whole startup program draw by."""
    # Noted where it is empty too: a server has some of the layers, and would count those alone.
    return attrs.updated(**{PLACES: layer_places(startup)})


@dataclass(frozen=True)
class _Named:
    """What a dispatcher of a script's own sees of a block."""

    name: str


def _chosen(
    method: type[PSDispatcher], endpoints: Sequence[str], cut: IrProgram
) -> tuple[str, ...]:
    """Returns the endpoint of each block, as a script's own dispatcher says it."""
    dispatcher = method(list(endpoints))
    return tuple(dispatcher.dispatch([_Named(part.name) for part in slices_of(cut)]))
