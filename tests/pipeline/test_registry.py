"""Passes by name, and their options."""

from dataclasses import dataclass

import pytest

from jaxfleet.errors import PassError
from jaxfleet.ir import Operator
from jaxfleet.pipeline import made_by, make_pass, options_of, register_pass, registered_passes
from tests.pipeline.toys import TOY_PASSES, AddCopies, Many, Needy, Nothing

pytestmark = pytest.mark.usefixtures("toy_passes")


def hint(error: pytest.ExceptionInfo[PassError]) -> str:
    return error.value.__notes__[-1]


def test_passes_are_listed_by_name() -> None:
    assert list(registered_passes()) == sorted(TOY_PASSES)
    assert registered_passes()["nothing"] is Nothing


def test_a_pass_knows_the_name_it_is_registered_under() -> None:
    assert make_pass("add_copies").name == "add_copies"


def test_a_name_is_given_once() -> None:
    with pytest.raises(PassError, match="'nothing' is registered twice: Nothing has the name"):
        register_pass("nothing")(AddCopies)


@pytest.mark.parametrize("name", ["a b", "", "a/b", "1a", "a,b"])
def test_a_name_is_an_identifier(name: str) -> None:
    with pytest.raises(PassError, match="cannot be named"):
        register_pass(name)(Nothing)


def test_options_not_given_have_their_defaults() -> None:
    assert make_pass("many", {"an_int": 3}) == Many(an_int=3)


def test_an_int_may_stand_for_a_float() -> None:
    made = make_pass("many", {"a_float": 2, "a_pair": ["b", 3]})
    assert made == Many(a_float=2.0, a_pair=("b", 3.0))
    assert isinstance(made, Many)
    assert type(made.a_float) is float


@pytest.mark.parametrize(
    ("option", "value", "what"),
    [
        ("an_int", "three", "option 'an_int' is int, not three"),
        ("an_int", 1.5, "option 'an_int' is int, not 1.5"),
        ("an_int", True, "option 'an_int' is int, not true"),
        ("an_int", None, "option 'an_int' is int, not none"),
        ("a_float", "half", "option 'a_float' is float, not half"),
        ("a_bool", 1, "option 'a_bool' is bool, not 1"),
        ("a_str", 8192, "option 'a_str' is str, not 8192"),
        ("a_tuple", 1, r"option 'a_tuple' is \[int, \.\.\.\], not 1"),
        ("a_tuple", (1, "b"), r"option 'a_tuple' is \[int, \.\.\.\], not \[1,b\]"),
        ("a_pair", ("a",), r"option 'a_pair' is \[str, float\], not \[a\]"),
        ("an_optional", "x", "option 'an_optional' is int or none, not x"),
        ("an_int", {}, r"option 'an_int' is int, not \{\}"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(option: str, value: object, what: str) -> None:
    with pytest.raises(PassError, match=f"many: {what}") as error:
        make_pass("many", {option: value})
    assert "its options are an_int: int = 1, a_float: float = 0.5" in hint(error)


def test_an_unknown_pass_is_answered_with_near_ones() -> None:
    with pytest.raises(PassError, match="no pass 'add_copy'") as error:
        make_pass("add_copy")
    assert "did you mean add_copies?" in hint(error)
    assert "the passes are add_copies, forget," in hint(error)


def test_an_unknown_option_is_answered_with_near_ones_and_all_defaults() -> None:
    with pytest.raises(PassError, match="add_copies: no option 'counts'") as error:
        make_pass("add_copies", {"counts": 2})
    assert hint(error) == "  hint: did you mean count? its options are count: int = 1"


def test_a_pass_without_options_says_so() -> None:
    with pytest.raises(PassError, match="nothing: no option 'x'") as error:
        make_pass("nothing", {"x": 2})
    assert hint(error) == "  hint: it has no options"


def test_an_option_without_a_default_must_be_given() -> None:
    assert make_pass("needy", {"endpoints": ("a:1",)}) == Needy(("a:1",))
    with pytest.raises(PassError, match="needy: option 'endpoints' is missing") as error:
        make_pass("needy")
    assert hint(error) == "  hint: its options are endpoints: [str, ...]"


def test_where_no_pass_is_registered_the_error_says_what_to_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jaxfleet.pipeline.registry._PASSES", {})
    with pytest.raises(PassError, match="no pass 'dce'") as error:
        make_pass("dce")
    assert "import jaxfleet.passes" in hint(error)


def test_a_default_can_come_from_a_factory() -> None:
    from dataclasses import field  # noqa: PLC0415  # shown where it matters

    @dataclass(frozen=True)
    class Listed(Nothing):
        names: tuple[str, ...] = field(default_factory=lambda: ("a", "b"))

    register_pass("listed")(Listed)
    assert [str(option) for option in options_of(Listed)] == ["names: [str, ...] = [a,b]"]


def test_an_operator_that_a_pass_made_says_so_and_keeps_its_line() -> None:
    op = made_by(Operator("send"), make_pass("add_copies"))
    assert op.source.made_by == "add_copies"
