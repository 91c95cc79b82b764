"""A job in fluid's dialect: the facts that its programs share, and its communication operators."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from jaxfleet.analysis.placement.sliced_layout import Slice
from jaxfleet.analysis.updates import Updates
from jaxfleet.errors import PassError
from jaxfleet.ir import Attr, Attrs, Kind, Operands, Operator, Role, Variable, trainer_name
from jaxfleet.ir.naming import LR_COUNTER
from jaxfleet.passes.pserver.job import Mark, PServerJob

_CONTROL = "__control_var@"  # fluid's marker that orders one operator after another


@dataclass
class Messages:
    """Creates the operators that communicate with servers, and declares the variables they need."""

    mark: Mark
    declared: dict[str, Variable] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=count)

    def control(self) -> str:
        name = f"{_CONTROL}{next(self._numbers)}"
        self.declared[name] = Variable(name, "raw", ())
        return name

    def rpc(
        self,
        op_type: str,
        read: Sequence[str],
        written: Sequence[str],
        attrs: Mapping[str, Attr],
        pair: tuple[tuple[str, str], ...] = (),
    ) -> Operator:
        ins, outs = Operands.named(X=read), Operands.named(Out=written)
        return self.mark(Operator(op_type, ins, outs, Attrs(attrs), Role.RPC, pair))

    def cut_or_join(
        self, op_type: str, read: Sequence[str], written: Sequence[str], attrs: Mapping[str, Attr]
    ) -> Operator:
        ins, outs = Operands.named(X=read), Operands.named(Out=written)
        return self.mark(Operator(op_type, ins, outs, Attrs(attrs), Role.DIST))


MODES = ("sync", "async", "half_async")  # the index is fluid's number of the mode


@dataclass(frozen=True)
class ExchangeMode:
    """How gradients and parameters travel."""

    # `sync`: servers wait for the gradients of all trainers, and take their mean. `async`: they
    # apply each on arrival. `half_async`: on arrival, in blocks that trainers cut
    mode: str = "sync"
    runtime_split: bool = False  # the sender and the receiver split and join, without operators
    local_barrier: bool = False  # a trainer waits until its sends have completed

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            what = f"insert_send_recv: mode is '{self.mode}'"
            raise PassError(what, hint=f"choose one of {', '.join(MODES)}")

    @property
    def is_plain(self) -> bool:
        return self == ExchangeMode()

    @property
    def has_barriers(self) -> bool:
        """Whether all trainers wait for each other in a step."""
        return self.mode == "sync" and not self.runtime_split


@dataclass(frozen=True)
class FluidJob:
    """A job of a program with roles that mark the updates."""

    updates: Updates
    job: PServerJob
    exchange: ExchangeMode

    @property
    def merges(self) -> bool:
        """Whether a server sums received gradients; not needed for a single trainer."""
        alone = self.exchange.runtime_split and self.job.trainers == 1
        return self.exchange.mode == "sync" and not alone

    @property
    def counts_steps(self) -> bool:
        """Whether trainers report steps to servers, which cannot see them, for learning rates."""
        made = {name for op in self.updates.schedule for name in op.writes}
        return self.exchange.mode != "sync" and LR_COUNTER in made

    def names(self, gradient: str, cuts: tuple[Slice, ...], trainer_id: int) -> list[str]:
        """Returns a trainer's names of the slices of a gradient that it sends."""
        own = self.exchange.mode == "sync" and self.job.trainers > 1
        names = [self.job.name(gradient, cut) for cut in cuts]
        return [trainer_name(name, trainer_id) for name in names] if own else names

    def endpoints(self, cuts: tuple[Slice, ...]) -> tuple[str, ...]:
        return tuple(self.job.placement[cut.name] for cut in cuts)

    def like(self, variable: str, name: str, cut: Slice, kind: Kind = Kind.TEMP) -> Variable:
        """Returns a slice of a variable, under another name."""
        whole = self.updates.variable(variable)
        shape = whole.shape if cut.is_whole else (cut.rows, *whole.shape[1:])
        return replace(whole, name=name, shape=shape, kind=kind)
