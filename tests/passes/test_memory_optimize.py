"""Reuse of memory: observed results of fluid's algorithm, and its rules."""

import pytest

from jaxfleet.errors import PassError
from jaxfleet.ir import Program, parse, verify
from jaxfleet.passes import MemoryOptimize

CHAIN = "a=x b=a c=b d=c e=d"


def chain(
    ops: str = CHAIN, sizes: str = "", given: str = "x: f32[4,4]", every: str = "4,4"
) -> Program:
    """Returns a program of operators `out=in,in`; only names and declared types matter here.

    Args:
        ops: the operators.
        sizes: `a:8,8` for individual shapes, or `b:i64/4`, with a dtype too.
        given: additional declarations, one per line.
        every: the shape of the others.
    """
    own = dict(pair.split(":") for pair in sizes.split())
    inputs = [line.strip() for line in given.split(";")]
    lines = ["program p", *(f"  {'data' if line[0] == 'x' else 'param'} {line}" for line in inputs)]
    lines += ["  block 0", "    forward"]
    known = set[str]()
    for out, read in (op.split("=") for op in ops.split()):
        dtype, _, shape = own.get(out, every).rpartition("/")
        type_ = "" if out in known else f": {dtype or 'f32'}[{shape}]"
        lines.append(f"      {out}{type_} = jax.neg({', '.join(read.split(','))})")
        known.add(out)
    return parse("\n".join(lines) + "\n")


def renamed(program: Program, **options: object) -> tuple[str, Program]:
    """Returns the reuses of memory, in order (`c=>a d=>b`), and the resulting program."""
    made = MemoryOptimize(**options).run(program)  # type: ignore[arg-type]
    verify(made)
    pairs = [
        f"{old}=>{new}"
        for before, after in zip(program.root.ops, made.root.ops, strict=True)
        for old, new in zip(before.writes, after.writes, strict=True)
        if old != new
    ]
    return " ".join(pairs), made


@pytest.mark.parametrize(
    ("program", "level", "found"),
    [
        (chain("a=x b=a c=b d=c", "a:8,8 b:4,4 c:2,2 d:4,4"), 0, "d=>b"),
        (chain("a=x b=a c=b d=c", "a:8,8 b:4,4 c:2,2 d:4,4"), 1, "c=>a d=>b"),
        (chain("a=x b=a c=b d=c", "a:b,8 b:n,8 c:n,4 d:b,4"), 1, "d=>a"),  # letters never match
        (chain("a=x b=a c=b", "a:b,n b:2 c:b,m"), 1, ""),
    ],
)
def test_what_is_large_enough_is_taken_at_level_1(program: Program, level: int, found: str) -> None:
    assert renamed(program, level=level)[0] == found


def test_a_name_that_is_written_again_gives_its_memory_to_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # fluid gave `a`, dead between its two values, to `c`, which the second `a` then overwrote.
    found, _ = renamed(chain("a=x b=a c=b a=x d=c,a"), print_log=True)
    assert found == "d=>b"
    assert capsys.readouterr().out.splitlines() == [
        "x :  a  cache :  a  is same var!",
        "!!! 0,  d[4, 4] => b[4, 4], cache idx 0, pool size 1",
    ]


def test_an_output_that_is_an_input_too_stays() -> None:
    assert renamed(chain("a=x b=a c=b c=c d=c e=d"))[0] == "c=>a c=>a d=>b e=>a"
    assert renamed(chain("a=x b=a b=b,x"))[0] == ""


def test_scalars_and_outputs_of_force_cpu_stay() -> None:
    assert renamed(chain(every=""))[0] == ""
    text = str(chain()).replace("jax.neg(a)", "jax.neg(a) {force_cpu=true}")
    assert renamed(parse(text))[0] == "c=>a e=>a"


def test_what_an_update_names_as_its_gradient_takes_memory_and_gives_none() -> None:
    text = str(chain("a=x b=a g=b c=g d=c e=d", given="x: f32[4,4];w: f32[4,4]"))
    program = parse(text.replace("jax.neg(b)", "jax.neg(b) for (w, g)"))
    found, made = renamed(program)
    assert found == "g=>a c=>b e=>b"
    assert made.root.ops[2].role_var == (("w", "a"),)
    assert "g=>" not in renamed(program, skip_grads=True)[0]


def test_what_is_fetched_is_not_overwritten() -> None:
    program = parse(str(chain("a=x b=a c=b d=c")) + "\n      fetch(a, d)\n")
    assert renamed(program)[0] == "d=>b"


def test_a_level_that_is_none_is_refused() -> None:
    with pytest.raises(PassError, match="level 2"):
        MemoryOptimize(2).run(chain())


def test_again_it_finds_nothing_and_remembers_what_it_found() -> None:
    made = renamed(chain())[1]
    assert MemoryOptimize().run(made) == made
