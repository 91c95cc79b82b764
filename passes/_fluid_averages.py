"""Writes servers' programs of jobs whose trainers update: servers add up what trainers made."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxfleet.analysis.slices import Slice
from jaxfleet.ir import (
    Attr,
    Attrs,
    Block,
    BlockRef,
    Kind,
    Operator,
    Program,
    Role,
    Variable,
)

_KINDS = (Kind.DATA, Kind.PARAM, Kind.STATE)


def delta_name(slice_name: str) -> str:
    """Returns what a slice's change is called: `w.block0.delta`."""
    return f"{slice_name}.delta"


@dataclass
class ServerBlocks:
    """The blocks of one server, and the variables that they need.

    Attributes:
        step: the step's program.
        endpoint: the server's.
        number: its number.
        trainers: how many there are.
        top: the variables of the program.
        blocks: block 0, which is written last, and one for each update.
        updates: the numbers of the blocks, with what each takes.
        holds: of each variable its name, what it is a part of, and its first row there, or -1.
    """

    step: Program
    endpoint: str
    number: int
    trainers: int
    top: dict[str, Variable] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=lambda: [Block()])
    updates: dict[int, str] = field(default_factory=dict)
    holds: dict[str, Attr] = field(default_factory=dict)

    def declare(self, param: str, name: str, kind: Kind, cut: Slice | None = None) -> None:
        """Declares a part of a parameter, or something like it."""
        like = self.step.lookup(param)
        is_cut = cut is not None and not cut.is_whole
        shape = (cut.rows, *like.shape[1:]) if cut is not None and is_cut else like.shape
        self.top[name] = replace(like, name=name, shape=shape, kind=kind)
        if kind is Kind.PARAM:
            self.holds[name] = (name, param, cut.start if cut is not None and is_cut else -1)

    def add_block(self, ops: Sequence[Operator], takes: str) -> None:
        """Adds a block that is run for what it takes."""
        index = len(self.blocks)
        self.blocks.append(Block(index, 0, ops=tuple(ops)))
        self.updates[index] = takes

    def program(
        self,
        serves: str,
        mode: str,
        facts: Mapping[str, Attr],
        mark: Callable[[Operator], Operator],
    ) -> Program:
        """Returns the whole.

        Args:
            serves: the operator of block 0.
            mode: of the job.
            facts: what the operator says besides.
            mark: says who made it.
        """
        if not self.updates:
            self.add_block((), "")
        attrs: dict[str, Attr] = {
            "Fanin": self.trainers,
            "endpoint": self.endpoint,
            "grad_to_block_id": tuple(f"{name}:{n}" for n, name in self.updates.items() if name),
            "optimize_blocks": tuple(BlockRef(index) for index in self.updates),
            "pserver_id": self.number,
            **facts,
        }
        serve = mark(Operator(serves, attrs=Attrs(attrs), role=Role.RPC))
        root = replace(self.blocks[0], ops=(serve,))
        said = self.step.attrs.updated(
            endpoint=self.endpoint,
            holds=tuple(self.holds.values()),
            mode=mode,
            pserver_id=self.number,
            role="pserver",
            trainers=self.trainers,
        )
        top = sorted(self.top.values(), key=lambda v: _KINDS.index(v.kind))
        name = f"{self.step.name}.pserver{self.number}"
        return Program(name, {v.name: v for v in top}, (root, *self.blocks[1:]), said)
