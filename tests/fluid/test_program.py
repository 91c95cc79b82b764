"""Programs: copies, pruning, text, what is kept of them."""

from jaxfleet.fluid.to_ir import ir_program
from tests.fluid.nets import built


def test_what_a_transpiler_says_of_a_program_goes_with_it() -> None:
    main, _ = built("fc1", "sgd")
    assert main._facts == {}
    main._facts.update(role="trainer", trainers=2, endpoints=("a:1", "b:2"))
    copy = main.clone()
    assert dict(ir_program(copy).attrs) == {
        "role": "trainer",
        "trainers": 2,
        "endpoints": ("a:1", "b:2"),
    }
    copy._facts["trainers"] = 3
    assert main._facts["trainers"] == 2
