"""docs/limits.md: every limit has the value of the constant that sets it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
ROWS = re.findall(r"^\| .+ \| (\d+)(?: (\w+))? \| `(\w+)` in `([^`]+)` \|$", PAGE, re.MULTILINE)


def first_value(path: Path, name: str) -> int:
    """Returns the number that a module, or a class in it, first assigns to a name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=found)], value=value)
                | ast.AnnAssign(target=ast.Name(id=found), value=ast.expr() as value)
            ) if found == name:
                return number_of(value)
    raise AssertionError(f"{path} assigns no '{name}'")


def number_of(value: ast.expr) -> int:
    """Returns a number as the code writes it: `4096`, or `4 << 30`."""
    match value:
        case ast.BinOp(left=left, op=ast.LShift(), right=right):
            return number_of(left) << number_of(right)
        case ast.Constant(value=int() as number):
            return number
    raise AssertionError(f"'{ast.unparse(value)}' is no number of a known form")


@pytest.mark.parametrize(("number", "unit", "name", "path"), ROWS, ids=[row[2] for row in ROWS])
def test_a_limit_is_that_of_the_code(number: str, unit: str, name: str, path: str) -> None:
    assert first_value(ROOT / path, name) == int(number) * UNITS[unit]


def test_every_row_of_the_limits_names_its_constant() -> None:
    section = PAGE.split("## Limits\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (?!limit|---)", section, re.MULTILINE)
    assert len(ROWS) == len(rows) > 25


def test_every_source_of_a_size_exists() -> None:
    section = PAGE.split("## Sizes tried\n")[1].split("\n## ")[0]
    scripts = re.findall(r"`(benchmarks/\w+\.py)`", section)
    assert len(scripts) > 8
    assert [script for script in scripts if not (ROOT / script).is_file()] == []
