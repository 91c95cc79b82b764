"""Which of the recorded programs run as they are written, and why not where one is refused.

`conformance/runs.txt` lists it, a line a case; `python -m tests.fluid.pserver.test_runs_of_cases`
writes it anew. What runs is read into a server's plan and a trainer's plain program here, and
trained by all optimizers in `test_training_pserver.py` and `test_executors.py`.
"""

import pytest

from jaxfleet import fluid
from jaxfleet.fluid.pserver import why_not
from jaxfleet.fluid.pserver.programs import plain_server, plain_trainer
from jaxfleet.fluid.to_ir import ir_program
from jaxfleet.lower import ExecutableCache
from jaxfleet.ps.server.plan_reader import read_plan
from tests.fluid.recorded import FOLDER, Case, cases
from tests.fluid.test_transpile_cases import transpiled

LISTED = FOLDER / "runs.txt"
CASES: list[Case] = cases("transpile_cases")


def verdict(case_id: str) -> str:
    """Returns `runs`, or why not; and checks that what runs can be made ready."""
    made = transpiled(case_id)
    servers = [main for main, _ in made.servers.values()]
    reasons = [why_not(ir_program(program)) for program in (made.trainer, *servers)]
    found = [reason.partition(";")[0] for reason in reasons if reason is not None]
    if found:
        return f"refused: {found[0]}"
    assert why_not(ir_program(made.startup)) is None
    assert plain_trainer(ir_program(made.trainer), ()).is_step
    for main in servers:
        assert_ready(main)
    return "runs"


def assert_ready(main: fluid.Program) -> None:
    """Checks that a server's plan needs exactly what its startup program may begin."""
    plan = read_plan(plain_server(ir_program(main)), ExecutableCache())
    made_anew = [n for n in plan.state if "@GRAD" in n or "tmp_" in n]
    assert not made_anew
    assert {name for name, v in plan.state.items() if v.kind.value == "param"} == {
        v.name for v in main.all_parameters()
    }


def line(case: Case) -> str:
    """Returns a case's line."""
    mode = "sync" if case["sync_mode"] else "async"
    shape = f"{case['trainers']}x{len(case['pservers'])}"
    said = ",".join(f"{name}={value}" for name, value in case["config"].items()) or "-"
    what = f"{case['id']} {case['net']} {case['optimizer']} {shape} {mode} {said}"
    return f"{what}: {verdict(case['id'])}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_a_case_runs_or_is_refused_as_it_is_listed(case: Case) -> None:
    listed = {text.split(" ", 1)[0]: text for text in LISTED.read_text().splitlines()}
    assert line(case) == listed[case["id"]]


def test_every_case_is_listed_once() -> None:
    listed = [text.split(" ", 1)[0] for text in LISTED.read_text().splitlines()]
    assert listed == [case["id"] for case in CASES]


if __name__ == "__main__":
    LISTED.write_text("".join(f"{line(case)}\n" for case in CASES))
