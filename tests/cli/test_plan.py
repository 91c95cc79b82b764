"""`jaxfleet plan`."""

import json
from pathlib import Path

import numpy as np
import optax
import pytest

from jaxfleet.analysis.placement.transfer_plan import transfer_plan
from jaxfleet.capture import capture, distributed_optimizer
from jaxfleet.cli import main
from jaxfleet.errors import PassError
from jaxfleet.ir import parse_all, print_program
from jaxfleet.pipeline import parse_pipeline, run_pipeline
from tests.analysis.groups_steps import step_of
from tests.zoo import ZOO

MLP = {
    "b1": np.zeros(16, np.float32),
    "b2": np.zeros(10, np.float32),
    "w1": np.zeros((64, 16), np.float32),
    "w2": np.zeros((16, 10), np.float32),
}
WANTED = """\
plan of 'step': 2 servers, 2 trainers
  127.0.0.1:6174 holds 2,432 bytes of parameters, 4,868 of optimizer state
    params/b1            16     64    128
    params/w1.block0  32x16  2,048  4,096
    params/w2.block0   8x10    320    640
  127.0.0.1:6175 holds 2,408 bytes of parameters, 4,820 of optimizer state
    params/b2            10     40     80
    params/w1.block1  32x16  2,048  4,096
    params/w2.block1   8x10    320    640
  bytes in each step:
                    receives  sends  to other servers
    127.0.0.1:6174     4,864  4,864                 0
    127.0.0.1:6175     4,816  4,816                 0
    each trainer       4,840  4,840
  metrics and statistics: 1 completed over all trainers, 4 bytes each way for each trainer
  balance: the fullest server holds 1.00 times the mean
  whole: params/b1 and params/b2: fits one block (min_block_size, slice_var, number of servers)
"""


@pytest.fixture
def adam(tmp_path: Path) -> str:
    path = tmp_path / "step.txt"
    path.write_text(print_program(step_of(optax.adam(1e-3), MLP), source=True))
    return str(path)


def printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["plan", *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_the_plan_of_a_small_network(adam: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(["--min-block-size", "64", adam], capsys) == WANTED


def test_the_plan_as_data(adam: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--json", "--servers=3", "--trainers=4", "--min-block-size=64", adam]
    plan = json.loads(printed(words, capsys))
    assert plan["trainers"] == 4
    assert plan["trainer"] == {"push_bytes": 4840, "pull_bytes": 4840}
    assert len(plan["servers"]) == 3
    assert sum(server["param_bytes"] for server in plan["servers"]) == 4840
    for server in plan["servers"]:
        assert server["from_trainers"] == server["to_trainers"] == 4 * server["param_bytes"]
        assert server["param_bytes"] == sum(each["param_bytes"] for each in server["blocks"])
    starts = {b["name"]: b["start"] for server in plan["servers"] for b in server["blocks"]}
    assert starts["params/w1.block1"] == 22
    extras = {name: value for name, value in plan["extras"].items() if value}
    assert extras == {"count": 1, "size_bytes": 4}


def test_whole_parameters_and_a_better_method_are_said(
    adam: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--no-slice", "--endpoints", "a:1, b:2", adam]
    lines = printed(words, capsys).splitlines()
    assert lines[1] == "  a:1 holds 4,160 bytes of parameters, 8,324 of optimizer state"
    held = "  balance: the fullest server holds 1.72 times the mean; 1.69 with the method balanced"
    assert held in lines
    even = printed([*words, "--method=balanced"], capsys)
    assert "  balance: the fullest server holds 1.69 times the mean\n" in even


def test_a_server_without_a_block_holds_nothing(
    adam: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert printed(["--servers=5", adam], capsys).count("    nothing\n") == 1


def test_what_keeps_a_parameter_whole_has_the_users_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "step.txt"
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    path.write_text(print_program(step_of(tx, MLP), source=True))
    out = printed(["--min-block-size=1", str(path)], capsys)
    (line,) = [line for line in out.splitlines() if "whole:" in line]
    assert "params/b1, params/b2, params/w1 and params/w2: reduces its rows" in line
    assert "groups_steps.py:" in line
    # A part of four bytes goes from each parameter to the other server.
    assert [words[-1] for words in map(str.split, out.splitlines()) if words[0] == "127.0.0.1:6175"
            and words[1] != "holds"] == ["8"]  # fmt: skip


def test_a_step_that_is_placed_is_shown_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    passes = parse_pipeline("slice_var{servers=3},dispatch{servers=3}")
    path = tmp_path / "step.txt"
    path.write_text(str(run_pipeline(step_of(optax.sgd(0.1), MLP), passes)))
    assert printed([str(path)], capsys).startswith("plan of 'step': 3 servers, 2 trainers\n")


def test_a_pipe_with_one_trainer_and_one_server(
    adam: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = printed(["--trainers=1", "--servers=1", adam], capsys)
    assert out.startswith("plan of 'step': 1 server, 1 trainer\n")
    assert "metrics" not in out


def test_startup_programs_are_printed_for_two_trainers_and_every_server(
    adam: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--startup", "--trainers=5", "--min-block-size=64", adam]
    programs = parse_all(printed(words, capsys))
    assert [program.name for program in programs] == [
        *("step.trainer0.startup", "step.trainer1.startup"),
        *("step.pserver0.startup", "step.pserver1.startup"),
    ]
    assert {program.attrs["trainers"] for program in programs} == {5}


@pytest.mark.parametrize("words", [["--servers=0"], ["--trainers=0"], ["--endpoints=h"]])
def test_numbers_that_make_no_job_are_user_errors(
    words: list[str], adam: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words, adam]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")


def test_a_plan_needs_a_placed_program() -> None:
    with pytest.raises(PassError, match="has no attribute 'endpoints'"):
        transfer_plan(step_of(optax.sgd(0.1), MLP), trainers=2)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("schedule", "bytes besides gradients: trainer 0 sends them"),
        ("aux_metrics", "each trainer receives 1,172 bytes besides parameters"),
        ("worst_rows", "; 1 of the batch's size not counted"),
    ],
)
def test_what_else_travels_is_counted(
    name: str, wanted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = ZOO[name]
    built = case.build(distributed_optimizer)
    step = capture(built.train_step, example=(built.state, built.batch(0, case.rows)))
    path = tmp_path / "step.txt"
    path.write_text(str(step.program))
    assert wanted in printed([str(path)], capsys)
