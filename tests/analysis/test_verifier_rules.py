"""Findings of the verifier in programs for several devices."""

from dataclasses import replace

import pytest

from jaxfleet.analysis.step_checks import meaning_rules
from jaxfleet.errors import VerifyError
from jaxfleet.ir import verify
from jaxfleet.passes import GradAllreduce
from tests.shared_zoo import captured_zoo


def test_a_program_that_lost_an_all_reduce_is_refused() -> None:
    program = GradAllreduce(devices=4).run(captured_zoo("mlp").program)
    lost = next(op for op in program.root.ops if op.role_var and op.type == "c_allreduce_sum")
    ops = [op for op in program.root.ops if op is not lost]
    broken = program.with_block(replace(program.root, ops=tuple(ops)))
    with pytest.raises(VerifyError, match="ends with another value on each device"):
        verify(broken, more_rules=meaning_rules)


def test_local_statistics_are_accepted_once_they_are_averaged() -> None:
    program = captured_zoo("cnn_batchnorm").program
    local = GradAllreduce(devices=4, local_statistics=True).run(program)
    assert any(op.type == "c_allreduce_avg" for op in local.root.ops)
    verify(local, more_rules=meaning_rules)
