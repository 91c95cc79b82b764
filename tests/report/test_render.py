"""The page as text: its size, what it may load, and names that look like markup."""

import json
import re
from dataclasses import replace

import pytest

from jaxfleet.ir import (
    Attrs,
    Block,
    BlockRef,
    Frame,
    Kind,
    Operands,
    Operator,
    Program,
    Role,
    Source,
    Variable,
)
from jaxfleet.report import History, StageRecord, build_report, of_program, render
from tests.report.drawn import OPS_PER_LAYER, deep_history

HOSTILE = (
    "<script>alert(1)</script>",
    "</script><script>document.title='broken'</script>",
    "<img src=x onerror=alert(1)>",
    "\"quoted\" 'name' & <b>",
    "<!--",
    "]]>",
    "{{DATA}}",
    "日本語 \u2028 \u202e txt.exe",
    "\ud800",
    "\x00\x1b[31m",
)


def hostile_program(names: tuple[str, ...] = HOSTILE) -> Program:
    """Returns a program whose parameters, files, scopes and name are all hostile."""
    given = {name: Variable(name, "f32", (4,), Kind.PARAM) for name in names}
    ops = [
        Operator(
            "jax.add",
            Operands.of(name, name),
            Operands.of(name),
            Attrs({"note": name}),
            Role.OPTIMIZE,
            ((name, f"{name}@GRAD"),),
            Source(f"/home/{name}/train.py", 3, name, name, ""),
        )
        for name in names
    ]
    return Program(names[0], given, (Block(ops=tuple(ops)),))


def bare_programs() -> tuple[Program, ...]:
    """Returns a program without operators, one with an empty block, and one of a deep recursion."""
    branch = Operator("jax.cond", attrs=Attrs({"branches": (BlockRef(1),)}))
    calls = tuple(Frame(name, n, name) for n, name in enumerate(HOSTILE))
    source = Source(HOSTILE[0], 3, HOSTILE[1], HOSTILE[2], "", calls)
    op = Operator("jax.neg", Operands.of("w"), Operands.of("w"), source=source)
    return (
        Program("nothing", {}, (Block(),)),
        Program("empty block", {}, (Block(ops=(branch,)), Block(1, 0))),
        Program("deep", {"w": Variable("w", "f32", (3,), Kind.PARAM)}, (Block(ops=(op,)),)),
    )


@pytest.mark.parametrize("program", bare_programs(), ids=lambda program: program.name)
def test_programs_with_hardly_anything_in_them_are_reported(program: Program) -> None:
    found = json.loads(data_in(render(build_report([of_program(program)]))))["programs"][0]
    assert found["name"] == program.name
    assert found["stages"][0]["counts"][-1] == program.op_count


def data_in(page: str) -> str:
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert len(found) == 1
    return str(found[0])


def test_hostile_names_stay_inside_the_data() -> None:
    history = of_program(hostile_program(), "<script>")
    page = render(build_report([replace(history, decisions=HOSTILE, notes=HOSTILE)]))
    assert page.count("<script") == 2
    assert "alert(1)</script>" not in page
    data = data_in(page)
    assert not set("<>&") & set(data)
    assert json.loads(data)["programs"][0]["decisions"] == list(HOSTILE)
    page.encode()  # a lone surrogate is escaped


def test_a_page_names_no_other_machine() -> None:
    page = render(build_report([deep_history(2)]))
    assert (
        re.findall(r"(?:https?:|wss?:|ftp:|file:)?//\w[\w.-]*\.\w", page.replace("// ", "")) == []
    )
    assert not re.findall(r"\b(?:src|href)\s*=", page)
    assert "@import" not in page
    assert "url(" not in page


def test_a_page_lets_nothing_else_run_or_load() -> None:
    page = render(build_report([deep_history(2)]))
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy


def test_text_is_never_read_as_markup() -> None:
    script = render(build_report([deep_history(1)]))
    for name in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert name not in script


def test_an_operator_takes_about_200_bytes_in_all_stages() -> None:
    history = deep_history(40)
    page, empty = render(build_report([history])), render(build_report([deep_history(1)]))
    ops = history.stages[0].program.op_count
    assert (len(page) - len(empty)) / ops < 250


@pytest.mark.grid
def test_a_step_of_5000_operators_takes_less_than_2_mb() -> None:
    large_page = render(build_report([deep_history(5000 // OPS_PER_LAYER + 3)]))
    data = json.loads(data_in(large_page))
    assert data["programs"][0]["stages"][0]["counts"][-1] >= 5000
    assert len(large_page) < 2_000_000


@pytest.mark.grid
def test_10000_parameters_are_reported() -> None:
    names = tuple(f"params/<{n}>/kernel" for n in range(10_000))
    program = hostile_program(names)
    history = History("many", (StageRecord("input", program), StageRecord("same", program)))
    page = render(build_report([history]))
    found = json.loads(data_in(page))["programs"][0]
    assert len(found["journeys"]) == 10_000
    assert len(page) < 6_000_000
