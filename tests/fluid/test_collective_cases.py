"""Every recorded case of the collective transpilers: the text, operator by operator."""

from itertools import zip_longest
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.fluid.transpiler import collective
from tests.fluid.nets import built
from tests.fluid.recorded import Case, cases

ENDPOINTS = [f"127.0.0.1:{6170 + rank}" for rank in range(4)]
# The recording machine could not create communicators, and omitted these.
COMMUNICATORS = ("c_gen_nccl_id", "c_comm_init")
CASES = cases("collective_cases")


def id_of(case: Case) -> str:
    words = (case["net"], case["optimizer"], case["mode"], *case["args"].values(), case["nranks"])
    return "-".join(map(str, words))


def transpiled(case: Case, *, part: int = 1) -> tuple[fluid.Program, fluid.Program]:
    """Returns the main and the startup program of a case, rewritten."""
    main, startup = built(case["net"], case["optimizer"], part=part)
    endpoints, rank = ENDPOINTS[: case["nranks"]], case["rank"]
    transpiler = getattr(collective, case["mode"])(**case["args"])
    transpiler.transpile(startup, main, rank, endpoints, endpoints[rank], wait_port=False)
    return main, startup


def described(op: fluid.Operator, wanted: Case) -> Case:
    """Returns an operator in the recorded form, with its temporaries and attributes."""
    read = zip_longest(op.input_arg_names, wanted["in"])
    names = [w if w == "<tmp>" and name is not None else name for name, w in read]
    found: Case = {"type": op.type, "in": names, "out": op.output_arg_names}
    if "attrs" in wanted:
        found["attrs"] = {name: _as_kept(op.attr(name)) for name in wanted["attrs"]}
    return found


def _as_kept(value: Any) -> Any:
    """Returns an attribute as fluid stores it: floats have 32 bits."""
    return float(np.float32(value)) if isinstance(value, float) else value


def same(program: fluid.Program, recorded: list[Case]) -> None:
    ops = program.global_block().ops
    if any(op.type == "c_gen_nccl_id" for op in ops):
        ops = [op for op in ops if op.type not in COMMUNICATORS]
    assert [op.type for op in ops] == [wanted["type"] for wanted in recorded]
    for op, wanted in zip(ops, recorded, strict=True):
        assert described(op, wanted) == wanted


def test_there_are_cases_of_every_mode() -> None:
    assert len(CASES) == 41
    assert {case["mode"] for case in CASES} == {
        *("GradAllReduce", "LocalSGD", "SingleProcessMultiThread"),
    }


@pytest.mark.parametrize("case", CASES, ids=id_of)
def test_a_transpiled_program_is_the_recorded_one(case: Case) -> None:
    main, startup = transpiled(case)
    same(main, case["main"])
    same(startup, case["startup"])
