"""The programs of a parameter server job: its passes with their options, its table, its digest.

Rows of a distributed table are created at their first lookup, from its initializer and their
number, so the table accepts any int64 id and its memory grows only with the rows in use. As in
fluid, its optimizer is SGD regardless of the program's.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jaxfleet.analysis.placement.sliced_layout import slices_of
from jaxfleet.analysis.updates import DIALECT, FLUID, Updates
from jaxfleet.fluid.framework.program import Program
from jaxfleet.fluid.framework.to_ir import ir_program
from jaxfleet.fluid.lowering.rewrites import PLACES, layer_positions
from jaxfleet.fluid.transpiler.config import DistributeTranspilerConfig
from jaxfleet.fluid.transpiler.details.vars_distributed import VarsDistributed, vars_distributed_of
from jaxfleet.fluid.transpiler.ps_dispatcher import HashName, PSDispatcher, RoundRobin
from jaxfleet.ir import Attr, Attrs, Kind, Literal, Operator, canonical, print_program
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
from jaxfleet.runtime.transpile import begin_series, transpile
from jaxfleet.tables import Constant, Normal, Sgd, TableSpec, Uniform
from jaxfleet.tables.validation import Part

DIGEST = "digest"
_OWN = frozenset(
    {
        *("seed", "op_namescope"),  # trainers may drop out other elements and rename scopes
        *("reads", "writes", "step_inputs", "ex_states", "states", "step_outputs"),  # temporaries
        *("forward_callable_id", "backward_callable_id", "names", "skipped"),  # of this process
        *("variable", "number", "draws_as"),
    }
)


def with_digest(step: IrProgram) -> IrProgram:
    """Returns a step with its digest, which all programs derived from it inherit.

    Names of temporaries, seeds and scopes do not affect it: processes that differ only there can
    train together.
    """
    blocks = [block.with_ops(map(_bare, block.ops)) for block in step.blocks]
    text = print_program(canonical(step.with_blocks(blocks)))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return replace(step, attrs=step.attrs.updated(**{DIGEST: digest}))


def _bare(op: Operator) -> Operator:
    kept = {name: value for name, value in op.attrs.items() if name not in _OWN}
    return replace(op, attrs=Attrs(kept)) if len(kept) < len(op.attrs) else op


SPECS = "distributed_tables"  # in a program's facts: table specifications, as text
REASON = "distributed_tables_not"  # the reason why servers cannot hold them


@dataclass(frozen=True)
class FoundTable:
    """The distributed table of a program."""

    # its specification; None if there is no table, or servers cannot hold it
    spec: TableSpec | None = None
    reason: str = ""  # why they cannot, and what to do

    @property
    def facts(self) -> Mapping[str, Attr]:
        """Facts about the table to record in programs."""
        if self.spec is not None:
            return {SPECS: (self.spec.to_text(),)}
        return {REASON: self.reason} if self.reason else {}


def find_table(main: IrProgram, startup: IrProgram) -> FoundTable:
    """Determines the distributed table of a step, given its startup program."""
    updates = Updates(main)
    if len(updates.tables) != 1:
        return FoundTable()
    (name,) = updates.tables
    begins = _maker(startup, name)
    initializer = None if begins is None else _initializer(begins)
    if initializer is None:
        how = "nothing" if begins is None else f"'{begins.type}'"
        what = f"rows of '{name}' are begun by {how}, which servers cannot do row by row"
        return FoundTable(
            reason=f"{what}; give the table a Constant, Uniform or Normal initializer"
        )
    update = next(op for op in updates.of(name) if op.inputs.slot("Param"))
    rate = _rate(main, startup, str(update.inputs.slot("LearningRate")[0]))
    if rate is None:
        what = f"the rate of the distributed table '{name}' is computed at every step"
        return FoundTable(reason=f"{what}, which servers do not; give the optimizer a number")
    dim = updates.variable(name).shape[1]
    assert isinstance(dim, int)
    spec = TableSpec(name=name, dim=dim, initializer=initializer, optimizer=Sgd(rate))
    return FoundTable(spec)


def _maker(program: IrProgram, name: str) -> Operator | None:
    found = [op for op in program.root.ops if name in op.writes]
    return found[0] if len(found) == 1 else None


def _initializer(op: Operator) -> Part | None:
    number = {name: _number(value) for name, value in op.attrs.items()}
    seed = int(number.get("seed", 0.0))
    match op.type:
        case "fill_constant":
            return Constant(number.get("value", 0.0))
        case "uniform_random":
            return Uniform(number.get("min", -1.0), number.get("max", 1.0), seed)
        case "gaussian_random":
            return Normal(number.get("mean", 0.0), number.get("std", 1.0), seed)
    return None


def _rate(main: IrProgram, startup: IrProgram, name: str) -> float | None:
    """Returns the learning rate of the table; None if it varies between steps."""
    made = _maker(main, name)
    if made is not None and made.type == "scale" and not _number(made.attrs.get("bias", 0.0)):
        whole = _rate(main, startup, made.reads[0])  # times the factor of ParamAttr
        return None if whole is None else whole * _number(made.attrs.get("scale", 1.0))
    begins = _maker(startup, name)
    if made is not None or begins is None or begins.type != "fill_constant":
        return None
    return _number(begins.attrs.get("value", 0.0))


def _number(value: Attr) -> float:
    """Returns a numeric attribute; 0 for any other value."""
    if isinstance(value, int | float):
        return float(value)
    return float(value.text) if isinstance(value, Literal) else 0.0


_METHODS = {RoundRobin: "round_robin", HashName: "hash_name"}


@dataclass(frozen=True)
class PServerJob:
    """Builds the programs of a job from those of a step, which it leaves unchanged."""

    main: Program
    startup: Program
    config: DistributeTranspilerConfig
    endpoints: tuple[str, ...]
    trainers: int
    is_sync: bool

    def trainer(self, trainer_id: int) -> IrProgram:
        send = replace(self._exchange, trainer_id=trainer_id)
        made = self._run(self.placed, send, PrefetchRows(trainer_id))
        return replace(made, attrs=made.attrs.updated(**self.table.facts))

    def trainer_startup(self, trainer: IrProgram) -> IrProgram:
        begun = ir_program(self.startup, name="startup")
        return self._run(replace(begun, attrs=_with_places(trainer.attrs, begun)), InsertStartup())

    def server(self, endpoint: str) -> IrProgram:
        send = replace(self._exchange, server=self.endpoints.index(endpoint))
        made = self._run(self.placed, send, *([DcAsgd()] if self.config.enable_dc_asgd else ()))
        return replace(made, attrs=made.attrs.updated(**self.table.facts))

    def server_startup(self, server: IrProgram, startup: Program) -> IrProgram:
        """Returns the startup program of `server`, given that of the step."""
        begun = ir_program(startup, name="startup")
        held = {v.name: v for v in server.of_kind(Kind.PARAM, Kind.STATE)}
        attrs = _with_places(server.attrs, begun)
        return self._run(
            replace(begun, variables={**begun.variables, **held}, attrs=attrs), InsertStartup()
        )

    @cached_property
    def table(self) -> FoundTable:
        return find_table(self.placed, ir_program(self.startup, name="startup"))

    def registry(self) -> VarsDistributed:
        """Returns the variables on servers, for saving and loading."""
        return vars_distributed_of(self.main, self.placed)

    @cached_property
    def placed(self) -> IrProgram:
        """The step, with the slices of its parameters and their servers."""
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
        """The earlier passes, with which the dump of each program begins."""
        return []

    @property
    def slices(self) -> bool:
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
    """Adds the layer positions of a whole startup program, which determine initial values."""
    # Recorded even if empty: a server has only some layers, and would count only those.
    return attrs.updated(**{PLACES: layer_positions(startup)})


@dataclass(frozen=True)
class _Named:
    """A block as passed to a script's own dispatcher."""

    name: str


def _chosen(
    method: type[PSDispatcher], endpoints: Sequence[str], cut: IrProgram
) -> tuple[str, ...]:
    """Returns the endpoint of each block, as chosen by a script's own dispatcher."""
    dispatcher = method(list(endpoints))
    return tuple(dispatcher.dispatch([_Named(part.name) for part in slices_of(cut)]))
