"""Pipelines as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfleet.errors import PassError
from jaxfleet.pipeline import Pass, parse_pipeline, pipeline_text
from tests.pipeline.toys import AddCopies, Many, Needy, Nothing

pytestmark = pytest.mark.usefixtures("toy_passes")

MANIES = st.builds(
    Many,
    an_int=st.integers(),
    a_float=st.floats(allow_nan=False),
    a_bool=st.booleans(),
    a_str=st.text(),
    a_tuple=st.lists(st.integers()).map(tuple),
    a_pair=st.tuples(st.text(), st.floats(allow_nan=False)),
    an_optional=st.none() | st.integers(),
)
COPIES = st.builds(AddCopies, count=st.integers())
NEEDIES = st.builds(Needy, endpoints=st.lists(st.text()).map(tuple))


def test_a_pipeline_without_options_is_a_list_of_names() -> None:
    assert parse_pipeline("nothing,add_copies") == (Nothing(), AddCopies())
    assert pipeline_text([Nothing(), AddCopies()]) == "nothing,add_copies"


def test_options_stand_in_braces() -> None:
    assert parse_pipeline("add_copies{count=3},nothing") == (AddCopies(3), Nothing())


def test_an_option_at_its_default_is_not_printed() -> None:
    assert pipeline_text([AddCopies(1)]) == "add_copies"
    assert pipeline_text([AddCopies(2)]) == "add_copies{count=2}"


def test_an_empty_text_is_no_pass() -> None:
    assert parse_pipeline(" ") == ()
    assert pipeline_text([]) == ""


def test_spaces_do_not_matter() -> None:
    text = " many { an_int = -3 , a_tuple = [ 1 , 2 ] , a_bool=true } , nothing "
    assert parse_pipeline(text) == (Many(an_int=-3, a_tuple=(1, 2), a_bool=True), Nothing())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a_float=1e-3", Many(a_float=0.001)),
        ("a_float=2", Many(a_float=2.0)),
        ("a_float=-inf", Many(a_float=float("-inf"))),
        ("a_str=ps0:6174", Many(a_str="ps0:6174")),
        ("a_str=params/Dense_0/kernel", Many(a_str="params/Dense_0/kernel")),
        ('a_str="8192"', Many(a_str="8192")),
        ('a_str="true"', Many(a_str="true")),
        ('a_str="a \\"quoted\\" {word}"', Many(a_str='a "quoted" {word}')),
        ("a_tuple=[]", Many()),
        ("a_pair=[b, 2]", Many(a_pair=("b", 2.0))),
        ("an_optional=none", Many()),
        ("an_optional=4", Many(an_optional=4)),
    ],
)
def test_a_value_reads_as_its_option_has_it(text: str, expected: Many) -> None:
    assert parse_pipeline(f"many{{{text}}}") == (expected,)


@given(st.lists(MANIES | COPIES | NEEDIES | st.just(Nothing()), max_size=4))
def test_a_pipeline_survives_printing_and_parsing(passes: list[Pass]) -> None:
    assert parse_pipeline(pipeline_text(passes)) == tuple(passes)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("nothing,", "expected the name of a pass, found the end at column 9"),
        (",nothing", "expected the name of a pass, found ',' at column 1"),
        ("nothing nothing", "expected ',', found 'nothing' at column 9"),
        ("add_copies{count}", "expected '=', found '}' at column 17"),
        ("add_copies{count=}", "expected a value, found '}' at column 18"),
        ("add_copies{count=1", "expected ',', found the end at column 19"),
        ("many{a_tuple=[1 2]}", "expected ',', found '2' at column 17"),
        ("nothing # again", "expected ',', found '# again' at column 9"),
        (f"many{{a_tuple={'[' * 65}", "more than 64 brackets in each other"),
        ("add_copies{=1}", "expected the name of an option, found '=' at column 12"),
        ("nothing; ls", "expected ',', found ';' at column 8"),
        ("add_copies{count=1.2.3}", "expected a number, found '1.2.3' at column 18"),
        ("add_copies{count=4MiB}", "expected ',', found 'MiB' at column 19"),
    ],
)
def test_a_text_that_is_no_pipeline_is_refused_at_its_column(text: str, what: str) -> None:
    with pytest.raises(PassError) as error:
        parse_pipeline(text)
    assert what in str(error.value)
    assert "pipelines read like" in error.value.__notes__[-1]


def test_an_option_is_given_once() -> None:
    with pytest.raises(PassError, match="add_copies: option 'count' is given twice"):
        parse_pipeline("add_copies{count=1,count=2}")


def test_a_wrong_type_in_a_text_is_refused_with_the_options() -> None:
    with pytest.raises(PassError, match="option 'count' is int, not many"):
        parse_pipeline("add_copies{count=many}")
