"""How many steps devices go until they meet, by how far the loss has fallen: AdaComm."""

from collections.abc import Iterator

from jaxfleet.ir import Kind, Operator, Variable, Word
from jaxfleet.passes._when_due import number, op

EVERY = "meet.every"
_LOSSES = "meet.losses"  # the sum of those since the last meeting
_FIRST = "meet.first"  # the mean loss until the first meeting; 0 before it
_FLOATS = ("total", "gone", "mean", "known", "fallen", "root", "exact", "next", "up", "least")
_FLAGS = ("fresh", "sane", "changes")


def held(every: int) -> list[tuple[Variable, str | int | float]]:
    """Returns the variables that are held from step to step, and what they begin with."""
    return [
        (Variable(EVERY, "i32", (), Kind.STATE), every),
        (Variable(_LOSSES, "f32", (), Kind.STATE), 0.0),
        (Variable(_FIRST, "f32", (), Kind.STATE), 0.0),
    ]


def temporaries() -> list[Variable]:
    """Returns what `adapted` declares."""
    floats = [Variable(f"meet.{name}", "f32", ()) for name in _FLOATS]
    flags = [Variable(f"meet.{name}", "bool", ()) for name in _FLAGS]
    return [*floats, *flags, Variable("meet.period", "i32", ())]


def adapted(loss: str, every: int) -> Iterator[Operator]:
    """Yields what finds the steps until the next meeting, where this step ends in one.

    `ceil(sqrt(F / F0) * every)`, with F the mean loss since the last meeting and F0 that until the
    first; from 1 to `every` (Wang and Joshi 2019, equation 14). Where that is no finite number the
    steps stay what they are, and F0 is the mean loss of a later meeting.

    Args:
        loss: a variable of block 0, f32[].
        every: the steps to begin with.
    """

    def to(name: str) -> tuple[str]:
        return (f"meet.{name}",)

    yield op("jax.add", (_LOSSES, loss), to("total"))
    yield op(
        "jax.convert_element_type",
        ("meet.more",),
        to("gone"),
        new_dtype=Word("f32"),
        weak_type=False,
    )
    yield op("jax.div", ("meet.total", "meet.gone"), to("mean"))
    yield op("jax.eq", (_FIRST, number(0)), to("fresh"))
    yield op("jax.select_n", ("meet.fresh", _FIRST, "meet.mean"), to("known"))
    yield op("jax.div", ("meet.mean", "meet.known"), to("fallen"))
    yield op("jax.sqrt", ("meet.fallen",), to("root"))
    yield op("jax.mul", ("meet.root", number(every)), to("exact"))
    yield op("jax.ceil", ("meet.exact",), to("up"))
    yield op("jax.min", ("meet.up", number(every)), to("least"))
    yield op("jax.max", ("meet.least", number(1)), to("next"))
    yield op(
        "jax.convert_element_type",
        ("meet.next",),
        to("period"),
        new_dtype=Word("i32"),
        weak_type=False,
    )
    yield op("jax.is_finite", ("meet.root",), to("sane"))
    yield op("jax.and", ("meet.due", "meet.sane"), to("changes"))
    yield op("jax.select_n", ("meet.changes", EVERY, "meet.period"), (EVERY,))
    yield op("jax.select_n", ("meet.changes", _FIRST, "meet.known"), (_FIRST,))
    yield op("jax.select_n", ("meet.due", "meet.total", number(0)), (_LOSSES,))
