"""The recorded programs that run unchanged, and the reasons for rejecting the others.

`conformance/runs.txt` lists them, one line per case; `python -m
tests.fluid.pserver.test_runs_of_cases` rewrites it. Here, accepted programs are read into a
server's plan and a trainer's plain program; `test_training_pserver.py` and `test_executors.py`
train them by all optimizers.
"""

import pytest

from jaxfleet import fluid
from jaxfleet.fluid.framework.to_ir import ir_program
from jaxfleet.fluid.pserver import why_not
from jaxfleet.fluid.pserver.normalization import normalize_server, normalize_trainer
from jaxfleet.lower import ExecutableCache
from jaxfleet.ps.server.program_loader import read_plan
from tests.fluid.recorded import FOLDER, Case, cases
from tests.fluid.test_transpile_cases import transpiled

LISTED = FOLDER / "runs.txt"
CASES: list[Case] = cases("transpile_cases")


def verdict(case_id: str) -> str:
    """Returns `runs`, or the reason why not; checks that accepted programs can be prepared."""
    made = transpiled(case_id)
    servers = [main for main, _ in made.servers.values()]
    reasons = [why_not(ir_program(program)) for program in (made.trainer, *servers)]
    found = [reason.partition(";")[0] for reason in reasons if reason is not None]
    if found:
        return f"refused: {found[0]}"
    assert why_not(ir_program(made.startup)) is None
    assert normalize_trainer(ir_program(made.trainer), ()).is_step
    for main in servers:
        assert_ready(main)
    return "runs"


def assert_ready(main: fluid.Program) -> None:
    """Checks that a server's plan needs exactly the variables of its startup program."""
    plan = read_plan(normalize_server(ir_program(main)), ExecutableCache())
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


@pytest.mark.few(40)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_a_case_runs_or_is_refused_as_it_is_listed(case: Case) -> None:
    listed = {text.split(" ", 1)[0]: text for text in LISTED.read_text().splitlines()}
    assert line(case) == listed[case["id"]]


def test_every_case_is_listed_once() -> None:
    listed = [text.split(" ", 1)[0] for text in LISTED.read_text().splitlines()]
    assert listed == [case["id"] for case in CASES]


if __name__ == "__main__":
    LISTED.write_text("".join(f"{line(case)}\n" for case in CASES))
