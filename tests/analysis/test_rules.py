"""What the verifier says of a program for several devices."""

from dataclasses import replace

import pytest

from jaxfleet.analysis.rules import meaning_rules
from jaxfleet.capture import capture, distributed_optimizer
from jaxfleet.errors import VerifyError
from jaxfleet.ir import Program, verify
from jaxfleet.passes import GradAllreduce
from tests.zoo import ZOO, lacking


def rewritten(name: str) -> Program:
    """Returns an entry of the zoo, rewritten for four devices."""
    built = ZOO[name].build(distributed_optimizer)
    example = (built.state, built.batch(0, ZOO[name].rows))
    return GradAllreduce(devices=4).run(capture(built.train_step, example=example).program)


@pytest.mark.parametrize("name", [case.name for case in lacking("marker_inside")])
def test_what_the_pass_makes_is_accepted(name: str) -> None:
    verify(rewritten(name), more_rules=meaning_rules)


def test_a_program_that_lost_an_all_reduce_is_refused() -> None:
    program = rewritten("mlp")
    lost = next(op for op in program.root.ops if op.role_var and op.type == "c_allreduce_sum")
    ops = [op for op in program.root.ops if op is not lost]
    broken = program.with_block(replace(program.root, ops=tuple(ops)))
    with pytest.raises(VerifyError, match="ends with another value on each device"):
        verify(broken, more_rules=meaning_rules)


def test_local_statistics_are_accepted_once_they_are_averaged() -> None:
    case = ZOO["cnn_batchnorm"]
    built = case.build(distributed_optimizer)
    program = capture(built.train_step, example=(built.state, built.batch(0, case.rows))).program
    local = GradAllreduce(devices=4, local_statistics=True).run(program)
    assert any(op.type == "c_allreduce_avg" for op in local.root.ops)
    verify(local, more_rules=meaning_rules)
