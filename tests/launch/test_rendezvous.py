"""Which machines a start has: the state machine of the first one, without clock or connections."""

import hypothesis
from hypothesis import strategies as st

from jaxfleet.launch.rendezvous import LAST_CALL_S, SILENT_S, Call, Meeting, Rendezvous
from jaxfleet.transport.messages import Plain

NAMES = ("a", "b", "c")


def made(least: int = 1) -> Rendezvous:
    return Rendezvous("job", NAMES, least)


def asked(machine: str, after: int = -1, *, session: str = "1", ranks: int = 2) -> Call:
    return Call("job", machine, session, ranks, after)


def begin(rendezvous: Rendezvous) -> None:
    """Lets all machines take part in start 0."""
    for name in NAMES:
        rendezvous.hear(asked(name), 0.0)
    assert rendezvous.meeting == Meeting(0, dict.fromkeys(NAMES, 2))


def waits(answer: dict[str, Plain]) -> object:
    assert Meeting.of(answer) is None
    return answer["waits"]


def test_a_start_has_all_machines_that_ask_in_time() -> None:
    rendezvous = made()
    assert waits(rendezvous.hear(asked("b"), 0.0)) == ["a", "c"]
    assert waits(rendezvous.hear(asked("a", ranks=4), 1.0)) == ["c"]
    found = Meeting.of(rendezvous.hear(asked("c"), 2.0))
    assert found == Meeting(0, {"a": 4, "b": 2, "c": 2})
    assert list(found.ranks) == ["a", "b", "c"]  # ranks are numbered in this order
    for name in "ab":  # an answer may be lost, so it is given again
        assert Meeting.of(rendezvous.hear(asked(name), 3.0)) == found


def test_a_machine_that_is_missing_is_left_out_after_the_last_call() -> None:
    rendezvous = made()
    begin(rendezvous)
    assert waits(rendezvous.hear(asked("a", 0), 100.0)) == ["b", "c"]
    assert waits(rendezvous.hear(asked("b", 0), 110.0)) == ["c"]
    now_s = 110.0
    while now_s < 100.0 + LAST_CALL_S - 1:
        now_s += 1
        assert waits(rendezvous.hear(asked("a", 0), now_s)) == ["c"]
        assert waits(rendezvous.hear(asked("b", 0), now_s)) == ["c"]
    found = Meeting.of(rendezvous.hear(asked("a", 0), 100.0 + LAST_CALL_S))
    assert found == Meeting(1, {"a": 2, "b": 2})
    # The next start does not wait for it again.
    rendezvous.hear(asked("b", 1), 200.0)
    assert Meeting.of(rendezvous.hear(asked("a", 1), 200.0)) == Meeting(2, {"a": 2, "b": 2})


def test_no_start_has_fewer_machines_than_are_enough() -> None:
    rendezvous = made(least=2)
    begin(rendezvous)
    for second in range(100, 1000):
        assert waits(rendezvous.hear(asked("a", 0), second)) == ["b", "c"]
    # The last call begins once they are enough.
    assert waits(rendezvous.hear(asked("b", 0), 1000)) == ["c"]
    now_s = 1000.0
    while Meeting.of(rendezvous.hear(asked("a", 0), now_s)) is None:
        rendezvous.hear(asked("b", 0), now_s)
        now_s += 1
    assert now_s == 1000.0 + LAST_CALL_S
    assert rendezvous.meeting == Meeting(1, {"a": 2, "b": 2})


def test_no_start_is_without_the_first_machine() -> None:
    rendezvous = made()
    rendezvous.hear(asked("c"), 0.0)
    for now_s in range(500):
        assert waits(rendezvous.hear(asked("b"), now_s)) == ["a"]
        assert waits(rendezvous.hear(asked("c"), now_s)) == ["a"]


def test_a_machine_that_comes_back_takes_part_in_the_next_start_only() -> None:
    rendezvous = made()
    begin(rendezvous)
    # Its old launch died in start 0, which goes on until ranks elsewhere fail.
    for now_s in range(100, 200):
        assert waits(rendezvous.hear(asked("c", session="2"), now_s)) == ["a", "b"]
    rendezvous.hear(asked("a", 0), 200.0)
    assert rendezvous.meeting is not None
    assert rendezvous.meeting.start == 0
    rendezvous.hear(asked("b", 0), 200.0)
    rendezvous.hear(asked("c", session="2"), 200.0)
    found = Meeting.of(rendezvous.hear(asked("c", session="2"), 200.5))
    assert found == Meeting(1, dict.fromkeys(NAMES, 2))


def test_a_machine_that_was_left_out_is_taken_in_again() -> None:
    rendezvous = made()
    begin(rendezvous)
    for now_s in range(int(LAST_CALL_S) + 1):
        rendezvous.hear(asked("b", 0), now_s)
        rendezvous.hear(asked("a", 0), now_s)
    assert rendezvous.meeting == Meeting(1, {"a": 2, "b": 2})
    assert waits(rendezvous.hear(asked("c", 0), 100.0)) == ["a", "b"]  # late
    rendezvous.hear(asked("b", 1), 105.0)
    rendezvous.hear(asked("a", 1), 105.0)
    assert rendezvous.meeting == Meeting(2, dict.fromkeys(NAMES, 2))


def test_a_launch_that_dies_while_it_waits_is_not_counted() -> None:
    rendezvous = made()
    begin(rendezvous)
    rendezvous.hear(asked("c", 0), 100.0)
    rendezvous.hear(asked("a", 0), 101.0)
    now_s = 100.0 + SILENT_S + 1
    assert waits(rendezvous.hear(asked("a", 0), now_s)) == ["b", "c"]
    assert waits(rendezvous.hear(asked("b", 0), now_s)) == ["c"]


def test_another_job_or_an_unknown_machine_is_refused() -> None:
    rendezvous = made()
    for call in (Call("other", "b", "1", 2), asked("x")):
        answer = rendezvous.hear(call, 0.0)
        assert "here meet the machines a, b, c of job 'job'" in str(answer["refused"])
    assert waits(rendezvous.hear(asked("b"), 0.0)) == ["a", "c"]


def test_what_is_malformed_is_no_call_and_no_meeting() -> None:
    whole = asked("b").plain()
    assert Call.of(whole) == asked("b")
    for name, value in (("ranks", "2"), ("ranks", 0), ("after", None)):
        assert Call.of({**whole, name: value}) is None
    assert Meeting.of({"start": 1, "ranks": [1]}) is None
    assert Meeting.of(Meeting(1, {"a": 2}).plain()) == Meeting(1, {"a": 2})


@hypothesis.given(
    st.lists(st.tuples(st.sampled_from(NAMES), st.floats(0.1, 40), st.booleans()), max_size=80),
    st.integers(1, 3),
)
def test_launches_never_disagree_on_a_start(
    calls: list[tuple[str, float, bool]], least: int
) -> None:
    """Machines ask in any order; some answers are lost, and some launches are replaced."""
    rendezvous, now_s = made(least), 0.0
    after, sessions = dict.fromkeys(NAMES, -1), dict.fromkeys(NAMES, 0)
    seen: dict[int, Meeting] = {}
    for name, pause_s, is_lost in calls:
        now_s += pause_s
        answer = rendezvous.hear(asked(name, after[name], session=str(sessions[name])), now_s)
        found = Meeting.of(answer)
        if found is None:
            continue
        assert seen.setdefault(found.start, found) == found
        assert len(found.ranks) >= least
        assert {"a", name} <= set(found.ranks)
        assert found.start > after[name]
        if is_lost:
            continue
        after[name] = found.start
        if int(now_s) % 7 == 0 and name != "a":  # its launch dies, and another one follows
            after[name], sessions[name] = -1, sessions[name] + 1
