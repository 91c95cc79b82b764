"""Servers initialize the rows that one process would draw."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.fluid.lowering.rewrites import RUN, with_seeds
from jaxfleet.ir import Program, parse
from jaxfleet.runtime import Executor

DRAWS = {
    "uniform_random": "max=1.0, min=-1.0",
    "gaussian_random": "mean=0.5, std=2.0",
    "truncated_gaussian_random": "mean=0.0, std=0.1",
}


def drawn(text: str, run: int = 5) -> dict[str, np.ndarray]:
    """Runs a startup program; returns all initialized variables."""
    program = with_seeds(parse(text))
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
    facts = f'holds=[["w.block{number}", "w", {start}]], role="pserver", slices=[["w", [4, 3]]]'
    return f"""program p {{{facts}}}
      param w.block{number}: f32[{rows},4]
      block 0
        forward
          Out=w.block{number} = {op}() {{{DRAWS[op]}, dtype="float32", seed={seed}, shape=[{rows}, 4]}}
    """  # noqa: E501  # an operator is one line


@pytest.mark.few(3)
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
    assert with_seeds(program) is program


def begun_as(
    kind: str, *, names_before: int = 0, widths: Sequence[int] = (200, 1), bias: bool | None = None
) -> dict[str, np.ndarray]:
    """Returns the initial value of each parameter of a net, by position.

    Args:
        kind: `alone`, or `servers`, each of which initializes some.
        names_before: the number of layers named before the net's.
        widths: of its layers.
        bias: False for layers without one.
    """
    endpoints = ["127.0.0.1:6174", "127.0.0.1:6175"]
    with fluid.unique_name.guard():
        for _ in range(names_before):
            fluid.unique_name.generate("fc")
        main, startup = fluid.Program(), fluid.Program()
        main.random_seed = startup.random_seed = 3
        with fluid.program_guard(main, startup):
            x, y = fluid.layers.data("x", [100]), fluid.layers.data("y", [1])
            out = x
            for width in widths:
                out = fluid.layers.fc(out, width, bias_attr=bias)
            loss = fluid.layers.mean(fluid.layers.square_error_cost(out, y))
            fluid.optimizer.SGD(0.1).minimize(loss)
    names = [p.name for p in main.all_parameters()]
    exe, scopes = fluid.Executor(fluid.CPUPlace()), [fluid.Scope()]
    if kind == "alone":
        exe.run(startup, scope=scopes[0])
    else:
        transpiler = fluid.DistributeTranspiler()
        transpiler.transpile(0, main, ",".join(endpoints), 1, startup_program=startup)
        scopes = [fluid.Scope() for _ in endpoints]
        for endpoint, scope in zip(endpoints, scopes, strict=True):
            exe.run(transpiler.get_pserver_programs(endpoint)[1], scope=scope)
    held = {n: np.array(s[n]) for s in scopes for n in s.local_var_names()}
    return {
        str(at): np.concatenate(
            [held[n] for n in sorted(held) if n == name or f"{name}.block" in n]
        )
        for at, name in enumerate(names)
    }


@pytest.mark.parametrize("kind", ["alone", "servers"])
def test_a_net_that_is_built_again_begins_alike_whatever_its_names_count_from(kind: str) -> None:
    first, again = begun_as("alone", names_before=0), begun_as(kind, names_before=7)
    assert list(first) == list(again) == ["0", "1", "2", "3"]
    for at, value in first.items():
        np.testing.assert_array_equal(value, again[at])
    assert np.abs(first["0"]).max() > 0


def test_servers_that_hold_some_layers_each_begin_them_as_one_process_does() -> None:
    widths = (5, 5, 5, 5, 1)  # too small to be sliced: the third is the second server's second
    alone = begun_as("alone", widths=widths, bias=False)
    servers = begun_as("servers", widths=widths, bias=False)
    assert list(alone) == list(servers) == ["0", "1", "2", "3", "4"]
    for at, value in alone.items():
        np.testing.assert_array_equal(servers[at], value, err_msg=at)
