"""Text that is nested too deep is rejected as malformed."""

from pathlib import Path

import pytest

from jaxfleet.cli import main
from jaxfleet.errors import ProgramError
from jaxfleet.ir import parse
from jaxfleet.transport.messages import Kind
from tests.ps.server.common import Bench, error_of, hello

HEAD = "program p\n  data  x: f32[b]\n  block 0\n    forward\n"
DEPTHS = (65, 1000, 100_000)


def nested_blocks(depth: int) -> str:
    blocks = (f"  block {at} in {at - 1} (x{at}: f32[b]) -> (x{at})" for at in range(1, depth + 1))
    return "\n".join([HEAD.rstrip(), *blocks])


TEXTS = {
    "lists": lambda n: f"{HEAD}      y: f32[b] = f(x) {{a={'[' * n}1{']' * n}}}",
    "lists without an end": lambda n: f"{HEAD}      y: f32[b] = f(x) {{a={'[' * n}",
    "attributes": lambda n: f"program p {'{a=' * n}1{'}' * n}",
    "structs": lambda n: f"program p {{a={'S{a=' * n}1{'}' * n}}}",
    "sizes": lambda n: f"program p\n  data  x: f32[{'(' * n}b{')' * n}]",
    "calls in sizes": lambda n: f"program p\n  data  x: f32[{'max(b,' * n}1{')' * n}]",
    "sizes in attributes": lambda n: f"program p {{a=<{'(' * n}b{')' * n}>}}",
    "blocks": nested_blocks,
}


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("kind", TEXTS)
def test_text_that_is_nested_too_deep_is_a_program_error(kind: str, depth: int) -> None:
    if kind == "blocks" and depth > 1000:
        depth = 2000  # each takes a line
    with pytest.raises(ProgramError, match="more than 64") as caught:
        parse(TEXTS[kind](depth))
    assert len(str(caught.value)) < 1200


def test_what_programs_have_is_read() -> None:
    text = f"{HEAD}      y: f32[b] = f(x) {{a={'[' * 30}1{']' * 30}, b=<{'(' * 30}b{')' * 30}>}}"
    assert str(parse(text).blocks[0].ops[0].attrs["a"]).count("(") == 30
    assert len(parse(nested_blocks(60)).blocks) == 61


def test_the_command_line_says_so_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "deep.txt").write_text(TEXTS["lists"](5000))
    assert main(["opt", str(tmp_path / "deep.txt")]) == 2
    assert "error: line 5: more than 64 brackets in each other" in capsys.readouterr().err


def test_a_server_refuses_such_a_program_and_goes_on() -> None:
    bench = Bench()
    assert bench.one(0, Kind.HELLO, body=hello(0)).kind is Kind.WELCOME
    for make in TEXTS.values():
        code, what = error_of(bench.send(0, Kind.DEFINE, body={"program": make(1000)}))
        assert code == "bad_message"
        assert "more than 64" in what
    assert bench.core.failure is None
