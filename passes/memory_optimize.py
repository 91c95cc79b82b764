"""Let operators write variables that are dead, as fluid's `memory_optimize` did."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from jaxfleet.analysis.uses import OuterUses
from jaxfleet.errors import PassError
from jaxfleet.ir import Attr, Block, Operator, Program, Role
from jaxfleet.passes._effects import Effects
from jaxfleet.passes._pool import Log
from jaxfleet.passes._reuse import Reuse, Rules
from jaxfleet.pipeline import Pass, register_pass

_RUNS_ITS_BLOCKS = ("while", "conditional_block")  # and jax's own
# Servers cut what they compute by the shapes that are declared.
_UPDATES = frozenset({Role.OPTIMIZE, Role.OPTIMIZE_LR_SCHED, Role.LR_SCHED})
_OF_THIS_PROGRAM = frozenset({"fetch", "cut", "delete_var"})  # their effects ask for no name


@register_pass("memory_optimize")
@dataclass(frozen=True)
class MemoryOptimize(Pass):
    """Lets operators write variables that are dead, so that a step has fewer of them.

    An operator's output takes the name of a variable that nothing reads any more and that has its
    dtype and its shape (level 0), or at least as many elements (level 1): the smallest that is
    enough; but what updates write always has its own shape. A variable is free from the operator
    behind its last reader on, so no operator writes what it reads. Sub-blocks count where they
    stand, and share names of their own; parameters, state, data and what is fetched by an operator
    keep theirs. So does what is sent: names travel. A gradient that an update names may take
    another's memory and gives its own to nothing, since transpilers look for where it is written
    last.

    XLA shares memory within an executable by itself. What this changes is what a program says:
    how many arrays it needs where every variable has one. Operators note whose value they write
    (`instead_of`), so that a fetch is served from where a value lies, or refused.

    After what `memory_optimize` of fluid did up to 1.5.

    Before::

        program p
          data  x: f32[4]
          block 0
            forward
              a: f32[4] = jax.sin(x)
              b: f32[4] = jax.cos(a)
              c: f32[4] = jax.tanh(b)
              d: f32[2] = jax.slice(c) {limit_indices=[2], start_indices=[0]}
              fetch(d)

    After::

        program p
          data  x: f32[4]
          block 0
            temp  c: f32[4]
            forward
              a: f32[4] = jax.sin(x)
              b: f32[4] = jax.cos(a)
              a = jax.tanh(b) {instead_of=[["a", "c"]]}
              d: f32[2] = jax.slice(a) {limit_indices=[2], start_indices=[0]}
              fetch(d)
    """

    level: int = 0  # 0: equal shapes; 1: what is large enough
    skip: tuple[str, ...] = ()  # variables that take no other's memory and give theirs to none
    skip_grads: bool = False  # so do the gradients that updates name
    print_log: bool = False  # print what takes whose memory, as fluid did

    runs_after = (
        *("insert_send_recv", "grad_allreduce", "grad_allreduce_by_role", "recompute"),
        "offload",
    )

    def run(self, program: Program) -> Program:
        if self.level not in (0, 1):
            what = f"memory_optimize: level {self.level!r}"
            raise PassError(what, hint="0 is for equal shapes, 1 for what is large enough")
        return _Rewrite(self, program).run()


class _Rewrite:
    """Goes through the blocks of a program, outer ones first."""

    def __init__(self, pass_: MemoryOptimize, program: Program) -> None:
        self.program, self.uses = program, OuterUses(program)
        self.blocks = list(program.blocks)
        self.say: Log = print if pass_.print_log else lambda _: None
        self.rules = _rules(pass_, program)
        self.count = 0

    def run(self) -> Program:
        whole = {0}  # blocks whose operators all run here, from the first to the last
        for index in range(len(self.blocks)):
            block = self.blocks[index]
            if index in whole:
                whole.update(i for op in block.ops if _runs_its_blocks(op) for i in op.blocks)
                self._reuse(block)
        made = self.program.with_blocks(self.blocks)
        return self.program if made == self.program else made

    def _reuse(self, block: Block) -> None:
        results = {item for item in block.results if isinstance(item, str)}
        rules = replace(self.rules, skip=self.rules.skip | results)
        reuse = Reuse(block, self.uses, rules, self.say, self.count)
        self.blocks[block.index] = reuse.run()
        self.count = reuse.count
        for index, names in reuse.renamed.items():
            self._rename(index, names)

    def _rename(self, index: int, names: dict[str, str]) -> None:
        """Renames what a sub-block, and those in it, use of the block around it."""
        block, ops = self.blocks[index], list[Operator]()
        for op in block.ops:
            pairs = tuple((w, names.get(g, g)) for w, g in op.role_var)
            inputs, outputs = op.inputs.renamed(names), op.outputs.renamed(names)
            ops.append(replace(op, inputs=inputs, outputs=outputs, role_var=pairs))
            for inner in op.blocks:
                self._rename(inner, names)
        self.blocks[index] = block.with_ops(ops)


def _runs_its_blocks(op: Operator) -> bool:
    return op.type in _RUNS_ITS_BLOCKS or op.type.startswith("jax.")


def _rules(pass_: MemoryOptimize, program: Program) -> Rules:
    gradients = {g for block in program.blocks for op in block.ops for _, g in op.role_var}
    skip = {*pass_.skip, *_texts(tuple(program.attrs.values())), *_asked_by_name(program)}
    kept, exact, is_cut = set(gradients), set(gradients), False
    for block in program.blocks:
        for op in block.ops:
            is_cut = is_cut or op.type == "cut"
            if op.type == "fetch":
                kept.update(op.reads)
            if op.role in _UPDATES:
                exact.update(op.writes)
            if op.attrs.get("force_cpu") is True:
                skip.update(op.writes)
    if pass_.skip_grads:
        skip |= gradients
    # What crosses a cut has the type that is declared: an executable is made for it.
    return Rules(0 if is_cut else pass_.level, skip, kept, exact)


def _asked_by_name(program: Program) -> Iterator[str]:
    """Yields what others know by its name: servers, other ranks, whoever runs a block."""
    effects, uses = Effects(), OuterUses(program)
    for block in program.blocks:
        for op in block.ops:
            acts = effects.has_effect(op) or effects.is_collective(op)
            runs_apart = bool(op.blocks) and not _runs_its_blocks(op)
            if runs_apart or (acts and op.type not in _OF_THIS_PROGRAM):
                used = uses.of(op)
                yield from used.reads
                yield from used.writes


def _texts(attr: Attr) -> Iterator[str]:
    """Yields the strings in an attribute, any of which may be a variable's name."""
    if isinstance(attr, str):
        yield attr
    elif isinstance(attr, tuple):
        for value in attr:
            yield from _texts(value)
