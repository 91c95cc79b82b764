"""Servers begin with the rows that one process would have drawn."""

from typing import Any

import numpy as np
import pytest

from jaxfleet.fluid.drawing import RUN, with_draws
from jaxfleet.ir import Program, parse
from jaxfleet.runtime import Executor

DRAWS = {
    "uniform_random": "max=1.0, min=-1.0",
    "gaussian_random": "mean=0.5, std=2.0",
    "truncated_gaussian_random": "mean=0.0, std=0.1",
}


def drawn(text: str, run: int = 5) -> dict[str, np.ndarray]:
    """Runs a startup program; returns all that it begins."""
    program = with_draws(parse(text))
    exe = Executor()
    exe.run(program, feed={RUN: np.uint32(run)} if RUN in program.variables else {})
    return {name: np.asarray(value) for name, value in exe.scope.items()}


def whole(op: str, seed: int = 0) -> str:
    """Returns the startup program of one process."""
    return f"""program p
      param b: f32[3]
      param w: f32[7,4]
      block 0
        forward
          Out=b = fill_constant() {{dtype="float32", shape=[3], value=0.5}}
          Out=w = {op}() {{{DRAWS[op]}, dtype="float32", seed={seed}, shape=[7, 4]}}
    """


def part(op: str, number: int, start: int, rows: int, seed: int = 0) -> str:
    """Returns the startup program of a server with some rows."""
    facts = f'holds=[["w.block{number}", "w", {start}]], role="pserver", slices=[["w", [4, 3]]]'
    return f"""program p {{{facts}}}
      param w.block{number}: f32[{rows},4]
      block 0
        forward
          Out=w.block{number} = {op}() {{{DRAWS[op]}, dtype="float32", seed={seed}, shape=[{rows}, 4]}}
    """  # noqa: E501  # an operator is one line


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("op", DRAWS)
def test_two_servers_begin_with_the_rows_of_one_process(op: str, seed: int) -> None:
    wanted = drawn(whole(op, seed))["w"]
    first = drawn(part(op, 0, 0, 4, seed))["w.block0"]
    second = drawn(part(op, 1, 4, 3, seed))["w.block1"]
    assert wanted.std() > 0
    np.testing.assert_array_equal(np.concatenate([first, second]), wanted)


def test_given_values_are_cut_too() -> None:
    program = f"""program p {{holds=[["w.block1", "w", 2]], slices=[["w", [2, 1]]]}}
      param w.block1: f32[1,2]
      block 0
        forward
          Out=w.block1 = assign_value() {{dtype="float32", shape=[3, 2], values={VALUES}}}
    """
    assert drawn(program)["w.block1"].tolist() == [[5.0, 6.0]]


VALUES = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_parameters_of_another_name_or_run_begin_otherwise() -> None:
    text = whole("uniform_random")
    first = drawn(text)["w"]
    assert not np.array_equal(first, drawn(text, run=6)["w"])
    assert not np.array_equal(first, drawn(text.replace(" w", " v").replace("Out=w", "Out=v"))["v"])


def test_a_program_that_draws_nothing_stays_as_it_is() -> None:
    program: Any = parse("program p\n  param w: f32[2]\n  block 0\n")
    assert isinstance(program, Program)
    assert with_draws(program) is program
