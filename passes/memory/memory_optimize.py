"""Reuse of buffers: fluid's `memory_optimize` and `release_memory`, and donation to updates."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jaxfleet.analysis.flow import Effects, OuterUses
from jaxfleet.errors import PassError
from jaxfleet.ir import Attr, Block, Kind, Operands, Operator, Program, Role, Variable
from jaxfleet.passes.memory.buffer_reuse import BufferReuse, Log, ReuseRules, is_array
from jaxfleet.pipeline import Pass, made_by, register_pass

_RUNS_ITS_BLOCKS = ("while", "conditional_block")  # and jax's own
# Servers cut computed values by their declared shapes.
_UPDATES = frozenset({Role.OPTIMIZE, Role.OPTIMIZE_LR_SCHED, Role.LR_SCHED})
_OF_THIS_PROGRAM = frozenset({"fetch", "cut", "delete_var"})  # their effects need no name


@register_pass("memory_optimize")
@dataclass(frozen=True)
class MemoryOptimize(Pass):
    """Makes operators overwrite dead variables, so that a step has fewer variables.

    An operator's output takes the name of a dead variable that has its dtype and its shape (level
    0), or at least as many elements (level 1): the smallest that suffices; but outputs of updates
    always keep their own shape. A variable is free after the operator of its last read, so no
    operator overwrites its own input. Sub-blocks count as part of their operator, and share names
    of their own. Parameters, state, data, values fetched by an operator and sent values keep their
    names. A gradient named by an update may reuse another's memory but does not offer its own,
    since transpilers search for its last write.

    XLA shares memory within an executable by itself. This changes the program's own demand: the
    number of arrays if every variable has one. Operators record the name that they replace
    (`instead_of`), so that a fetch finds the value, or is rejected.

    After fluid's `memory_optimize`, up to 1.5.

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

    Examples:
        Level 1 lets `d`, of two elements, take the memory of `b`, of four:

        >>> from jaxfleet.ir import parse
        >>> from jaxfleet.passes import MemoryOptimize
        >>> from jaxfleet.testing import docstring_programs
        >>> program = parse(docstring_programs(MemoryOptimize)[0][0])
        >>> [op.writes for op in MemoryOptimize(level=1).run(program).root.ops]
        [('a',), ('b',), ('a',), ('b',), ()]
        >>> [op.writes for op in MemoryOptimize(level=1, skip=("b",)).run(program).root.ops]
        [('a',), ('b',), ('a',), ('d',), ()]
    """

    level: int = 0  # 0: equal shapes; 1: sufficient size
    skip: tuple[str, ...] = ()  # variables that neither reuse memory nor offer theirs
    skip_grads: bool = False  # the same for gradients named by updates
    print_log: bool = False  # print each reuse, as fluid did

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
        reuse = BufferReuse(block, self.uses, rules, self.say, self.count)
        self.blocks[block.index] = reuse.run()
        self.count = reuse.count
        for index, names in reuse.renamed.items():
            self._rename(index, names)

    def _rename(self, index: int, names: dict[str, str]) -> None:
        """Renames outer variables in a sub-block, at any depth."""
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


def _rules(pass_: MemoryOptimize, program: Program) -> ReuseRules:
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
    # A value that crosses a cut has its declared type, for which an executable is made.
    return ReuseRules(0 if is_cut else pass_.level, skip, kept, exact)


def _asked_by_name(program: Program) -> Iterator[str]:
    """Yields names used outside of the program: by servers, other ranks, or the runtime."""
    effects, uses = Effects(), OuterUses(program)
    for block in program.blocks:
        for op in block.ops:
            acts = effects.runs_once(op)
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


@register_pass("release_memory")
@dataclass(frozen=True)
class ReleaseMemory(Pass):
    """Adds a `delete_var` after every operator that is the last reader of a variable.

    Released are temporaries and data with axes, except parameters, state, skipped and unread
    variables, and variables named by a `fetch`, which are read when the step is over. A sub-block's
    reads count as reads of its operator; its own variables end with it.

    The runtime frees unread values anyway: XLA within an executable, the runtime between
    executables. So this pass documents releases, for readers, checks and counts of a program. With
    `at_cuts` it does so where the runtime frees: one `delete_var` before each `cut`, of the
    temporaries last read by the executable that ends there.

    After fluid's `release_memory`, up to 1.5.

    Before::

        program p
          data  x: f32[4]
          param w: f32[4]
          block 0
            forward
              a: f32[4] = jax.sin(x)
              b: f32[4] = jax.mul(a, w)
              c: f32[4] = jax.cos(b)
              fetch(c)

    After::

        program p
          data  x: f32[4]
          param w: f32[4]
          block 0
            forward
              a: f32[4] = jax.sin(x)
              delete_var(X=x)
              b: f32[4] = jax.mul(a, w)
              delete_var(X=a)
              c: f32[4] = jax.cos(b)
              delete_var(X=b)
              fetch(c)
    """

    skip: tuple[str, ...] = ()  # variables that are not released
    at_cuts: bool = False  # only temporaries, before the `cut` after their last reader

    runs_after = (
        *("insert_send_recv", "grad_allreduce", "grad_allreduce_by_role"),
        *("recompute", "memory_optimize", "offload"),
    )

    def run(self, program: Program) -> Program:
        ops = [op for op in program.root.ops if op.type != "delete_var"]
        uses = OuterUses(program)
        dead = self._dead_behind(program, ops, uses)
        written: list[Operator] = []
        waiting: list[str] = []
        for place, op in enumerate(ops):
            if self.at_cuts and op.type == "cut":
                written += self._release(waiting, op)
                waiting = []
            written.append(op)
            if self.at_cuts:  # a name that is written again before the cut holds another value
                waiting = [name for name in waiting if name not in uses.of(op).writes]
                waiting += dead[place]
            else:
                written += self._release(dead[place], op)
        made = program.with_block(program.root.with_ops(written))
        return program if made == program else made

    def _release(self, names: Sequence[str], of: Operator) -> Iterator[Operator]:
        if names:
            inputs = Operands.named(X=sorted(names))
            yield made_by(Operator("delete_var", inputs, role=of.role, source=of.source), self)

    def _dead_behind(
        self, program: Program, ops: Sequence[Operator], uses: OuterUses
    ) -> list[list[str]]:
        """Returns the variables last read by each operator, and not written again."""
        found = list[list[str]]()
        kept = {name for op in ops if op.type == "fetch" for name in op.reads}
        live = kept | set(self.skip)  # read after the current operator
        for op in reversed(ops):
            used = uses.of(op)
            inside = {name for index in op.blocks for name in uses.of_block(index).writes}
            reads = used.reads | inside
            dead = [name for name in reads - live if self._is_released(program, name)]
            found.append(dead)
            live = (live - ({*op.writes} - inside - kept - {*self.skip})) | reads
        return found[::-1]

    def _is_released(self, program: Program, name: str) -> bool:
        variable: Variable = program.lookup(name)
        if variable.kind is Kind.DATA and not self.at_cuts:
            return is_array(replace(variable, kind=Kind.TEMP))
        return is_array(variable)


@register_pass("donate")
@dataclass(frozen=True)
class Donate(Pass):
    """Records which parameters and state may give their buffers to their updates.

    A step that keeps its inputs holds each parameter twice, old and new, and also each of the
    optimizer's moments: for Adam that is three extra copies of the model. If the step writes the
    variable, the old value is dead at its end, so XLA may write the new one in its place. A
    variable that a step only reads (a frozen layer, a learning rate) is not written back, so
    donating it would leave the next step without it.

    The names are recorded in the program's attribute `donate`, in order of declaration; `lower`
    passes them to jit. Runs last: a pass that adds or removes a write changes the result.

    Before::

        program p
          data  g: f32[4]
          param w: f32[4]
          param frozen: f32[4]
          state m: f32[4]
          block 0
            optimize
              m = jax.add(m, g)
              d: f32[4] = jax.mul(m, frozen)
              w = jax.sub(w, d)

    After::

        program p {donate=["w", "m"]}
          data  g: f32[4]
          param w: f32[4]
          param frozen: f32[4]
          state m: f32[4]
          block 0
            optimize
              m = jax.add(m, g)
              d: f32[4] = jax.mul(m, frozen)
              w = jax.sub(w, d)
    """

    def run(self, program: Program) -> Program:
        uses = OuterUses(program)
        written = {name for op in program.root.ops for name in uses.of(op).writes}
        persistable = program.of_kind(Kind.PARAM, Kind.STATE)
        donated = tuple(v.name for v in persistable if v.name in written)
        attrs = program.attrs.without("donate")
        if donated:
            attrs = attrs.updated(donate=donated)
        return program if attrs == program.attrs else replace(program, attrs=attrs)
