"""Drawn programs keep their meaning when names are shared and released, also in sub-blocks."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxfleet as jf
from jaxfleet.analysis.memory.final_variables import final_variables
from jaxfleet.analysis.step_checks import meaning_rules
from jaxfleet.errors import FeedError
from jaxfleet.ir import Program, parse, verify
from jaxfleet.ops import Interpreter
from jaxfleet.passes import MemoryOptimize, ReleaseMemory
from jaxfleet.runtime.compiled_program import prepare
from tests.passes.following import check_rewritten

HEAD = """program drawn
  data  flag: bool[1]
  data  limit: f32[1]
  data  x: f32[4]
  param p: f32[4]
  state s: f32[2]"""
GIVEN = {
    "flag": np.array([True]),
    "limit": np.array([2.5], np.float32),
    "x": np.linspace(-1, 1, 4, dtype=np.float32),
    "p": np.linspace(0.1, 3, 4, dtype=np.float32),
    "s": np.array([0.5, -2], np.float32),
}
SIZES = {"w": 4, "n": 2, "x": 4, "p": 4, "s": 2}
SEEDS = range(8)
RANDOMS = st.randoms(use_true_random=False)


class Drawing:
    """Writes a program: `w..` and `p` have four elements, `n..` and `s` two."""

    def __init__(self, drawn: random.Random) -> None:
        self.random = drawn
        self.blocks: list[str] = []

    def program(self) -> Program:
        known = ["x", "p", "s"]
        lines = [line for _ in range(16) for line in self.root_ops(known)]
        lines.append(f"fetch({self.random.choice(known)})")
        root = [HEAD, "  block 0", "    forward", *(f"      {line}" for line in lines)]
        return parse("\n".join([*root, *self.blocks]) + "\n")

    def root_ops(self, known: list[str]) -> Iterator[str]:
        kind = self.random.choice(["plain"] * 6 + ["if", "loop"])
        if kind == "plain":
            yield self.op(known, [f"w{n}" for n in range(9)], [f"n{n}" for n in range(6)])
            return
        index = len(self.blocks) + 1
        mine = list(known)
        own = [f"w_{index}_{n}" for n in range(3)], [f"n_{index}_{n}" for n in range(2)]
        outer = [name for name in known if name != "x"]
        # Outer variables that a block writes have been written before.
        body = [self.op(mine, *own, more=outer) for _ in range(self.random.randint(2, 6))]
        wrote = [line.split(" = ")[0].split(":")[0] for line in body]
        written = [name for name in dict.fromkeys(wrote) if name in known]
        if not written:
            return
        reads = ", ".join(known)
        turn, go = f"turn{index}", f"go{index}"
        if kind == "loop":
            yield f"{turn}: f32[1] = jax.sub(limit, limit)"
            yield f"{go}: bool[1] = jax.lt({turn}, limit)"
            body += [f"{turn} = jax.add({turn}, 1.0:f32)", f"{go} = jax.lt({turn}, limit)"]
            out = ", ".join([*written, turn, go])
            called = f"while(Condition={go}, X=[{reads}, {turn}, limit])"
        else:
            out = ", ".join(written)
            called = f"conditional_block(Cond=flag, Input=[{reads}])"
        lines = [f"  block {index} in 0", "    forward", *(f"      {line}" for line in body)]
        self.blocks.append("\n".join(lines))
        yield f"Out=[{out}] = {called} {{sub_block=^{index}}}"

    def op(
        self, known: list[str], wide: list[str], narrow: list[str], more: list[str] | None = None
    ) -> str:
        choose = self.random.choice
        first = choose(known)
        size = SIZES[first[0]]
        pair = f"{first}, {choose([name for name in known if SIZES[name[0]] == size])}"
        kinds = {4: ["tanh", "add", "cut"], 2: ["tanh", "add", "join"]}[size]
        kind = choose(kinds)
        size = {"cut": 2, "join": 4}.get(kind, size)
        names = (wide if size == 4 else narrow) + ["p" if size == 4 else "s"]
        names += [name for name in more or () if SIZES[name[0]] == size]
        out = choose(names)
        declared = "" if out in known else f": f32[{size}]"
        known += [out] * (out not in known)
        called = {
            "tanh": f"jax.tanh({first}) {{accuracy=none}}",
            "add": f"jax.add({pair})",
            "cut": f"jax.slice({first}) {{limit_indices=[2], start_indices=[0]}}",
            "join": f"jax.concatenate({pair}) {{dimension=0}}",
        }[kind]
        return f"{out}{declared} = {called}"


ORDERS = {
    "share": ("share",),
    "release": ("release",),
    "share, release": ("share", "release"),
    "release, share": ("release", "share"),
}


@given(RANDOMS, st.sampled_from(list(ORDERS.values())), st.sampled_from([0, 1]), st.data())
def test_operators_read_what_they_read_and_skipped_names_and_state_stay(
    drawn: random.Random, order: tuple[str, ...], level: int, data: st.DataObject
) -> None:
    program = Drawing(drawn).program()
    verify(program, more_rules=meaning_rules)
    temps = sorted(program.root.variables)
    skip = data.draw(st.lists(st.sampled_from(temps), unique=True, max_size=4)) if temps else []
    by_name = data.draw(st.lists(st.booleans(), min_size=len(skip), max_size=len(skip)))
    pairs = zip(skip, by_name, strict=True)
    skipped = {name if named else program.lookup(name) for name, named in pairs}
    made = program
    for what in order:
        if what == "share":
            made = jf.memory_optimize(made, skipped, level=level)
        else:
            made = jf.release_memory(made, list(skipped))
        verify(made, more_rules=meaning_rules)
    followed = check_rewritten(program, made, level=level, skip=skip)
    assert followed.served >= len(program.variables)


def at_end(program: Program) -> dict[str, np.ndarray]:
    """Returns the final value of every variable, by interpretation."""
    names = [*program.root.variables]
    return {n: np.asarray(v) for n, v in Interpreter(program, {}).run(GIVEN, keep=names).items()}


@pytest.mark.parametrize("seed", SEEDS[:3])
def test_what_is_fetched_is_what_it_was_run_step_by_step(seed: int) -> None:
    program = Drawing(random.Random(seed)).program()
    wanted = at_end(program)
    for made in variants(program):
        found, served = at_end(made), 0
        for name, value in wanted.items():
            try:
                (where,) = final_variables(made, [name])
            except FeedError:
                continue
            np.testing.assert_array_equal(found[where], value, err_msg=name)
            served += 1
        assert served >= len(program.variables)


@pytest.mark.parametrize("seed", SEEDS[:2])
def test_compiled_it_gives_the_same(seed: int) -> None:
    program = Drawing(random.Random(seed)).program()
    wanted = compiled(program)
    for made in variants(program)[1:3]:
        for name, value in compiled(made).items():
            np.testing.assert_array_equal(value, wanted[name], err_msg=name)


def test_some_of_them_share_names_in_sub_blocks_too() -> None:
    inner = outer = 0
    for seed in SEEDS:
        old = Drawing(random.Random(seed)).program()
        pairs = zip(old.blocks, MemoryOptimize(1).run(old).blocks, strict=True)
        changed = [before.ops != after.ops for before, after in pairs]
        outer, inner = outer + changed[0], inner + any(changed[1:])
    assert outer > len(SEEDS) // 2
    assert inner >= 2


def variants(program: Program) -> list[Program]:
    """Returns the program with names shared, released, or both in either order."""
    share, larger, release = MemoryOptimize(0), MemoryOptimize(1), ReleaseMemory()
    shared = larger.run(program)
    return [share.run(program), shared, release.run(shared), share.run(release.run(program))]


def compiled(program: Program) -> dict[str, np.ndarray]:
    """Returns the state and the remaining variables of a compiled program."""
    names = []
    for name in program.root.variables:
        try:
            final_variables(program, [name])
        except FeedError:
            continue
        names.append(name)
    written = {name for op in program.root.ops for name in op.writes}
    names = [name for name in names if final_variables(program, [name])[0] in written]
    ready = prepare(program, tuple(names))
    state = {v.name: GIVEN[v.name] for v in ready.state}
    fetched, new = ready.function({}, state, {v.name: GIVEN[v.name] for v in ready.data})
    values = {**dict(zip(names, fetched, strict=True)), **new}
    return {name: np.asarray(value) for name, value in values.items()}
