"""What a report says of operators, parameters, memory and traffic."""

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest

import jaxfleet as jf
from jaxfleet.analysis.memory import memory_profile
from jaxfleet.analysis.optimizer_groups import find_optimizer_groups
from jaxfleet.analysis.placement.transfer_plan import transfer_plan
from jaxfleet.ir import parse
from jaxfleet.passes import Dispatch, SliceVar, TrainApart
from jaxfleet.pipeline import Record, run_pipeline
from jaxfleet.report import History, build_report, of_program, of_record
from tests.report.decoding import data_of, orders
from tests.report.drawn import WIDTH, deep_history, deep_step, server_histories
from tests.shared_zoo import built_zoo

ROWS = 32  # of one device, of 128 over four


@pytest.fixture(scope="module")
def data() -> Any:
    return data_of(build_report([deep_history(3)]))


def lines_of(data: Any, type_: str) -> list[list[Any]]:
    program, strings = data["programs"][0], data["strings"]
    last = list(orders(program))[-1]
    lines = [program["lines"][line] for line in last]
    return [x for x in lines if x[0] == 0 and strings[x[1][-1][2]] == type_]


def test_shardings_are_those_of_propagation(data: Any) -> None:
    strings = data["strings"]
    (first, *_) = lines_of(data, "jax.tanh")
    assert [strings[n] for n in first[10]] == ["sharded(0)"]
    gradients = [x for x in lines_of(data, "jax.dot_general") if len(x) > 11]
    assert {strings[x[10][0]] for x in gradients} == {"partial(sum)"}
    assert {strings[x[10][0]] for x in lines_of(data, "c_allreduce_sum")} == {"replicated"}


def test_products_have_their_flops(data: Any) -> None:
    first = lines_of(data, "jax.dot_general")[0]
    assert first[8] == 2 * ROWS * WIDTH * WIDTH


def test_an_all_reduce_has_its_bytes_and_its_maker(data: Any) -> None:
    strings = data["strings"]
    found = lines_of(data, "c_allreduce_sum")
    assert {strings[x[6]] for x in found} == {"grad_allreduce"}
    assert max(x[9] for x in found) == 4 * WIDTH * WIDTH


def test_memory_is_the_profiles(data: Any) -> None:
    history = deep_history(3)
    (curve,) = data["programs"][0]["memory"]
    profile = memory_profile(history.last, {"b": ROWS})
    assert curve["bytes"] == list(profile.bytes)
    assert [value[4] for value in curve["values"]] == [x.made for x in profile.values if x.bytes]


def test_memory_has_the_operators_of_sub_blocks() -> None:
    built = built_zoo("scanned_norm")
    captured = jf.capture(built.train_step, example=(built.state, built.batch(0, 8)))
    history = replace(of_program(captured.program), rows=8)
    data = data_of(build_report([history]))["programs"][0]
    (curve,) = data["memory"]
    rows = dict.fromkeys(data["sizes"], 8)
    assert max(curve["bytes"]) == memory_profile(captured.program, rows).peak
    inside = sum(len(block.ops) for block in captured.program.blocks[1:])
    assert len(curve["ops"]) == len(captured.program.root.ops) + inside - 2  # two loops
    for variable, size, first, behind, made in curve["values"]:
        assert 0 <= first < behind <= len(curve["ops"])
        assert made <= first
        assert data["variables"][variable][3] == size
    alive = [0] * (len(curve["ops"]) + 1)
    for _, size, first, behind, _ in curve["values"]:
        alive[first] += size
        alive[behind] -= size
    assert list(accumulate(alive))[:-1] == curve["bytes"]


def test_state_that_devices_have_apart_is_varying() -> None:
    record = Record()
    run_pipeline(deep_step(2), [TrainApart(devices=4)], instruments=[record])
    data = data_of(build_report([History("apart", of_record(record), rows=128)]))
    program, strings = data["programs"][0], data["strings"]
    lines = [program["lines"][n] for n in list(orders(program))[-1]]
    of_kind = {
        strings[x[1][-1][2]]: {strings[n] for n in x[10]}
        for x in lines
        if x[0] == 3 and len(x) > 10
    }
    assert of_kind["param"] == {"varying"}
    assert {strings[n] for x in lines_of(data, "jax.tanh") for n in x[10]} == {"sharded(0)"}


RANKS = """program p {nranks=2, rank=0, role="collective"}
  param w: f32[3]
  state rate: f32[1]
  data  x: f32[3]
  block 0
    forward
      loss: f32[3] = elementwise_mul(w, x)
    backward
      w@GRAD: f32[3] = elementwise_mul(loss, x)
      w@GRAD = c_allreduce_sum(w@GRAD)
    optimize
      half: f32[1] = scale(rate)
      w = elementwise_sub(w, w@GRAD)
"""


@pytest.mark.parametrize(("reduced", "state"), [(True, "replicated"), (False, "varying")])
def test_ranks_of_fluid_have_alike_what_a_collective_made(reduced: bool, state: str) -> None:
    lines = RANKS.splitlines(keepends=True)
    text = "".join(line for line in lines if reduced or "c_allreduce" not in line)
    data = data_of(build_report([of_program(parse(text))]))
    program, strings = data["programs"][0], data["strings"]
    found = {}
    for number in list(orders(program))[-1]:
        line = program["lines"][number]
        if len(line) > 9:
            version = line[1][-1]
            found[program["variables"][version[3][0]][0], line[0]] = strings[line[10][0]]
    assert found["w", 3] == state
    assert found["x", 3] == "varying"
    assert found["loss", 0] == "varying"
    assert found["half", 0] == "replicated"
    assert found["w", 0] == state


def test_memory_is_shown_with_and_without_a_budget() -> None:
    history = replace(deep_history(3), budget_bytes=1000, fitted_by="grad_allreduce")
    program = data_of(build_report([history]))["programs"][0]
    assert [curve["title"] for curve in program["memory"]] == [
        "without the budget",
        "with the budget",
    ]
    assert program["budget"] == 1000


def test_a_text_without_a_number_of_rows_says_what_is_assumed() -> None:
    program = data_of(build_report([of_program(deep_step(2))]))["programs"][0]
    assert (program["sizes"], program["assumed"]) == ({"b": 32}, True)


@pytest.mark.parametrize("place", range(4))
def test_imagined_servers_hold_what_jaxfleet_plan_says(data: Any, place: int) -> None:
    found = data["programs"][0]["imagined"][place]
    servers = len(found["servers"])
    placed = Dispatch(servers=servers, max_imbalance=0.0).run(
        SliceVar(servers=servers).run(deep_step(3))
    )
    expected = transfer_plan(placed, trainers=2, groups=find_optimizer_groups(placed))
    assert [x["param_bytes"] for x in found["servers"]] == [x.param_bytes for x in expected.servers]
    assert [x["from_trainers"] for x in found["servers"]] == [
        x.from_trainers for x in expected.servers
    ]


def test_a_parameter_is_followed_to_its_servers_and_back() -> None:
    report = build_report([deep_history(3, servers=2), *server_histories(3, 2)])
    data = data_of(report)
    trainer = data["programs"][0]
    names = [trainer["variables"][journey[0]][0] for journey in trainer["journeys"]]
    journey = trainer["journeys"][names.index("params/Dense_1/kernel")]
    steps = [step[0] for step in journey[3]]
    assert steps == [
        "use",
        "gradient",
        "slice",
        "slice",
        "send",
        "update",
        "update",
        "receive",
        "join",
    ]
    slices = [step for step in journey[3] if step[0] == "slice"]
    assert "params/Dense_1/kernel.block0: rows 0 to 127" in slices[0][2]
    for _, line, said, server in [step for step in journey[3] if step[0] == "update"]:
        program = data["programs"][server]
        out = program["lines"][line][1][-1][3][0]
        assert program["variables"][out][0].startswith("params/Dense_1/kernel.block")
        assert program["endpoint"] in said
    assert journey[2] == ["opt_state/trace/Dense_1/kernel"]


def test_steps_come_before_servers() -> None:
    report = build_report([*server_histories(2, 2), deep_history(2, servers=2)])
    assert [program.role for program in report.programs] == ["trainer", "server", "server"]
