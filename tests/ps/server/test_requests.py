"""Admission, rejections, and limits of waits."""

import re
from typing import Any

import numpy as np
import pytest

from jaxfleet.ps.server import ServerOptions
from jaxfleet.transport.messages import Kind, Message
from tests.ps.server.common import (
    ENDPOINT,
    SGD,
    SGD_SHAPES,
    Bench,
    error_of,
    hello,
    sgd_after,
    sgd_grads,
    sgd_state,
)

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"protocol": 1}, "the trainer uses protocol 1, and this server 2"),
    ({"job": "other"}, "trainer 1 reports job other, and trainer 0 reports j"),
    ({"trainers": 3}, "trainer 1 reports trainers 3, and trainer 0 reports 2"),
    ({"program": "def"}, "trainer 1 reports program def, and trainer 0 reports abc"),
    (
        {"servers": [ENDPOINT, "x:1"]},
        "trainer 1 reports servers ['127.0.0.1:7001', 'x:1'], and trainer 0 reports",
    ),
    ({"trainer": 2}, "there is no trainer 2 of 2"),
    ({"trainer": 0}, "there is a trainer 0 already, last heartbeat 0.0 s ago: hello"),
    ({"trainer": "1"}, "a hello needs trainer, trainers and servers"),
    ({"trainers": None}, "a hello needs trainer, trainers and servers"),
]


@pytest.mark.parametrize(("changed", "what"), REFUSED)
def test_a_hello_that_does_not_fit_is_refused(changed: dict[str, Any], what: str) -> None:
    bench = Bench()
    bench.one(0, Kind.HELLO, body=hello(0))
    code, text = error_of(bench.send(1, Kind.HELLO, body=hello(1, **changed)))
    assert code == "refused"
    assert what in text
    assert bench.one(1, Kind.HELLO, body=hello(1)).kind is Kind.WELCOME


@pytest.mark.parametrize("servers", [[{"a": 1}], ["x" * 5000], [[ENDPOINT]], [7]])
def test_servers_that_are_no_endpoints_are_refused(servers: list[Any]) -> None:
    bench = Bench(ServerOptions(server=0))
    code, text = error_of(bench.send(0, Kind.HELLO, body=hello(0, servers=servers)))
    assert code == "refused"
    assert text.startswith("servers are a list of endpoints")


def test_who_came_and_went_before_there_was_a_program_does_not_keep_the_trainers_out() -> None:
    bench = Bench(ServerOptions(server=0, trainers=2, as_trainers_say=True))
    wrong = hello(1, program="another", lost_after_s=0.5, session="x")
    assert bench.one(1, Kind.HELLO, body=wrong, peer=b"x").kind is Kind.WELCOME
    bench.send(1, Kind.REDUCE, 0, {"key": "k", "how": "max"}, {"x": np.ones(1)}, peer=b"x")
    _, text = error_of(bench.send(0, Kind.HELLO, body=hello(0)))
    assert "and trainer 1 reports another" in text
    bench.wait(1.0)
    bench.started(SGD, sgd_state())
    assert bench.core.options.lost_after_s == ServerOptions().lost_after_s
    stranger = bench.send(1, Kind.REDUCE, 0, {"key": "k", "how": "max"}, peer=b"x")
    assert error_of(stranger)[0] == "stranger"
    bench.wait(1.0)
    assert error_of(bench.send(1, Kind.HELLO, body=wrong, peer=b"x"))[0] == "refused"


def test_a_server_that_knows_its_job_refuses_another() -> None:
    bench = Bench(ServerOptions(server=0, job="mine", trainers=2))
    _, text = error_of(bench.send(0, Kind.HELLO, body=hello(0)))
    assert text == "trainer 0 reports job j, and the server mine"


def test_a_server_that_no_hello_names_refuses_it() -> None:
    code, text = error_of(Bench().send(0, Kind.HELLO, body=hello(0, servers=["x:1"])))
    assert code == "refused"
    assert text == "trainer 0 names the servers ['x:1'], and this one is 127.0.0.1:7001"


def test_a_trainer_may_come_back_with_its_session_or_when_it_was_lost() -> None:
    bench = Bench(ServerOptions(lost_after_s=10))
    bench.one(0, Kind.HELLO, body=hello(0, session="s"), peer=b"a")
    assert error_of(bench.send(0, Kind.HELLO, body=hello(0), peer=b"b"))[0] == "refused"
    again = bench.one(0, Kind.HELLO, body=hello(0, session="s"), peer=b"c")
    assert again.kind is Kind.WELCOME
    assert error_of(bench.send(0, Kind.STATS, peer=b"a"))[0] == "stranger"
    bench.now += 11
    assert bench.one(0, Kind.HELLO, body=hello(0), peer=b"d").kind is Kind.WELCOME


def test_nothing_is_done_before_hello() -> None:
    bench = Bench()
    for kind in (Kind.DEFINE, Kind.PUSH, Kind.PULL, Kind.SAVE, Kind.BYE, Kind.VALUES):
        code, text = error_of(bench.send(0, kind))
        assert (code, text) == ("stranger", f"trainer 0 sent {kind.value} before hello")
    assert bench.core.outbox.errors == 6


def test_the_welcome_says_where_the_server_is() -> None:
    bench = Bench()
    body = bench.one(0, Kind.HELLO, body=hello(0)).body
    assert (body["server"], body["step"], body["defined"]) == (0, -1, False)
    assert body["incarnation"] == bench.core.incarnation
    bench.started(SGD, sgd_state())
    body = bench.one(0, Kind.HELLO, body=hello(0)).body
    assert (body["step"], body["defined"]) == (0, True)


ONE = np.ones(2, np.float32)
BAD: list[tuple[Kind, dict[str, Any], dict[str, np.ndarray], str]] = [
    (Kind.PUSH, {}, {"q": ONE}, "there is no gradient 'q' here"),
    (Kind.PUSH, {}, {"b": ONE}, "there is no gradient 'b' here"),
    (Kind.PUSH, {}, {"b@GRAD": np.ones(3, np.float32)}, "'b@GRAD' is float32[3], not float32[2]"),
    (Kind.PUSH, {}, {"b@GRAD": np.ones(2)}, "'b@GRAD' is float64[2], not float32[2]"),
    (Kind.ASSIGN, {}, {"b": np.ones(2)}, "'b' is float64[2], not float32[2]"),
    (Kind.PULL, {"names": ["q"]}, {}, "server 0 does not hold 'q'"),
    (Kind.PULL, {"names": "b"}, {}, "a pull needs 'names', a list"),
    (Kind.PULL, {"names": [1]}, {}, "a pull needs 'names', a list"),
    (Kind.REDUCE, {"key": "k", "how": "mean"}, {"x": ONE}, "there is no reduction 'mean'"),
    (Kind.REDUCE, {"how": "sum"}, {"x": ONE}, "a reduce needs 'key', a string"),
    (Kind.REDUCE, {"key": "k", "how": "xor"}, {"x": ONE}, "which has no bits to xor"),
    (Kind.BARRIER, {}, {}, "a barrier needs 'name', a string"),
    (Kind.DEFINE, {}, {}, "a define needs 'program', a string"),
    (Kind.DEFINE, {"program": SGD.replace("0.5", "0.25")}, {}, "defines another program"),
    (Kind.SAVE, {}, {}, "server 0 keeps no checkpoints"),
    (Kind.SAVE, {"path": 3}, {}, "the path of a save is a string"),
    (Kind.LOAD, {}, {}, "a load needs 'path', a string"),
    (Kind.WELCOME, {}, {}, "a trainer sends no welcome"),
]


@pytest.mark.parametrize(("kind", "body", "arrays", "what"), BAD)
def test_a_bad_request_is_answered_and_changes_nothing(
    kind: Kind, body: dict[str, Any], arrays: dict[str, np.ndarray], what: str
) -> None:
    bench = Bench().started(SGD, sgd_state())
    _, text = error_of(bench.send(1, kind, 1, body, arrays))
    assert what in text
    for trainer in (0, 1):
        bench.push(trainer, 1, sgd_grads(trainer, 1))
    values = bench.pull(1, 1, *SGD_SHAPES)
    for name, wanted in sgd_after(1).items():
        np.testing.assert_array_equal(values[name], wanted)


def test_a_push_with_one_bad_array_brings_none() -> None:
    bench = Bench().started(SGD, sgd_state())
    bench.push(0, 1, sgd_grads(0, 1))
    error_of(bench.push(1, 1, {**sgd_grads(1, 1), "q": ONE}))
    assert bench.core.step == 0


def test_gradients_need_a_state() -> None:
    bench = Bench()
    bench.one(0, Kind.HELLO, body=hello(0))
    assert error_of(bench.push(0, 1, {"b@GRAD": ONE}))[1] == "the server has no program"
    bench.one(0, Kind.DEFINE, body={"program": SGD})
    assert "before any state" in error_of(bench.push(0, 1, {"b@GRAD": ONE}))[1]


NO_PROGRAMS = {
    "nonsense": "expected a line 'program NAME' first",
    "program p\n  block 0\n": "is not one listen_and_serv",
    SGD.replace("pserver_id=0, ", ""): "does not say its pserver_id",
    SGD.replace(
        "optimize_blocks=[^1, ^2, ^3]", "optimize_blocks=7"
    ): "optimize_blocks is not a list",
    SGD.replace("b: f32[2]", "b: f32[n]"): "'b' is f32[n], which has letters for sizes",
    SGD.replace("block 3", "block 4"): "expected block 3: block 4",
}


@pytest.mark.parametrize("text", NO_PROGRAMS)
def test_what_is_no_servers_program_is_refused_and_another_try_is_free(text: str) -> None:
    bench = Bench()
    bench.one(0, Kind.HELLO, body=hello(0))
    code, found = error_of(bench.send(0, Kind.DEFINE, body={"program": text}))
    assert code == "bad_message"
    assert NO_PROGRAMS[text] in found
    assert bench.one(0, Kind.DEFINE, body={"program": SGD}).kind is Kind.OK


def test_a_reduction_that_numpy_cannot_do_is_an_error_for_all() -> None:
    bench = Bench().started(SGD, sgd_state())
    body = {"key": "k", "how": "max"}
    odd = np.zeros(2, np.dtype([("a", np.int8)]))
    bench.send(0, Kind.REDUCE, 1, {**body}, {"x": odd})
    replies = bench.send(1, Kind.REDUCE, 1, {**body}, {"x": odd})
    assert sorted(peer for peer, _ in replies) == [b"0", b"1"]
    assert {error_of([reply])[0] for reply in replies} == {"failed"}


def test_too_much_for_later_steps_is_refused() -> None:
    bench = Bench(ServerOptions(queued_bytes=100)).started(SGD, sgd_state())
    bench.push(0, 1, sgd_grads(0, 1))
    code, text = error_of(bench.push(0, 2, sgd_grads(0, 2)))
    assert code == "bad_message"
    assert "step 2 is 1 steps ahead" in text


def test_a_pull_of_a_step_that_is_past_is_refused() -> None:
    bench = Bench().started(SGD, sgd_state())
    for step in (1, 2):
        for trainer in (0, 1):
            bench.push(trainer, step, sgd_grads(trainer, step))
    error = error_of(bench.send(0, Kind.PULL, 1, {"names": ["b"]}))
    assert error[1] == "'b' was requested for step 1, and server 0 is past it, at step 2"


def test_a_barrier_waits_for_all() -> None:
    bench = Bench().started(SGD, sgd_state())
    for name in ("one", "one"):  # the same name again is a second round
        assert not bench.send(1, Kind.BARRIER, 3, {"name": name})
        replies = bench.send(0, Kind.BARRIER, 3, {"name": name})
        assert sorted(peer for peer, _ in replies) == [b"0", b"1"]


def test_a_barrier_does_not_wait_for_who_said_bye() -> None:
    bench = Bench().started(SGD, sgd_state())
    assert not bench.send(0, Kind.BARRIER, 3, {"name": "end"})
    replies = bench.send(1, Kind.BYE)
    assert [(peer, message.kind) for peer, message in replies] == [(b"1", Kind.OK), (b"0", Kind.OK)]
    assert not bench.core.finished
    bench.send(0, Kind.BYE)
    assert bench.core.finished


def test_a_step_that_misses_a_trainer_that_left_is_an_error() -> None:
    bench = Bench().started(SGD, sgd_state())
    bench.push(0, 1, sgd_grads(0, 1))
    assert not bench.send(0, Kind.PULL, 1, {"names": ["b"]})
    bench.send(1, Kind.BARRIER, 7, {"name": "x"})
    replies = bench.send(1, Kind.BYE)
    code, text = error_of([reply for reply in replies if reply[0] == b"0"])
    assert code == "peer_lost"
    assert text.startswith("trainer 1 left after step 7; trainer 0 waited 0.0 s in pull")
    assert "of step 1 for w@GRAD.block0" in text


def test_who_waits_for_a_silent_trainer_is_told_what_it_last_said() -> None:
    bench = Bench(ServerOptions(lost_after_s=5)).started(SGD, sgd_state())
    beat(bench, 1, "step 1")
    bench.push(0, 1, sgd_grads(0, 1))
    assert not bench.send(0, Kind.PULL, 1, {"names": ["b"]})
    assert not bench.wait(4)
    beat(bench, 0, "waiting")
    code, text = error_of(bench.wait(2))
    assert code == "peer_lost"
    assert "trainer 1 is lost: silent for 5.5 s, last heartbeat 5.5 s ago: step 1" in text
    assert beat(bench, 0, "waiting").body["lost"] == ["trainer 1"]
    assert not bench.core.tick(bench.now)


def test_who_waits_for_a_trainer_that_lives_is_told_after_the_longer_time() -> None:
    options = ServerOptions(lost_after_s=5, step_timeout_s=30)
    bench = Bench(options).started(SGD, sgd_state())
    assert not bench.send(0, Kind.REDUCE, 1, {"key": "loss", "how": "sum"}, {"x": ONE})
    for _ in range(10):
        assert not bench.wait(3)
        for trainer in (0, 1):
            beat(bench, trainer, "compiling")
    code, text = error_of(bench.wait(1))
    assert code == "timeout"
    assert "trainer 1: last heartbeat 0.5 s ago: compiling" in text
    assert "in reduce of step 1 for reduce 'loss'" in text


def test_silence_while_the_server_itself_stood_still_does_not_count() -> None:
    bench = Bench(ServerOptions(lost_after_s=5)).started(SGD, sgd_state())
    bench.push(0, 1, sgd_grads(0, 1))
    assert not bench.send(0, Kind.PULL, 1, {"names": ["b"]})
    bench.now += 100
    bench.core.forgive(100)
    assert not bench.core.tick(bench.now)
    assert not beat(bench, 1, "step 1").body["lost"]


def test_a_wait_while_the_server_itself_stood_still_does_not_count() -> None:
    options = ServerOptions(lost_after_s=500, step_timeout_s=30)
    bench = Bench(options).started(SGD, sgd_state())
    bench.push(0, 1, sgd_grads(0, 1))
    assert not bench.send(0, Kind.PULL, 1, {"names": ["b"]})
    assert not bench.send(0, Kind.REDUCE, 1, {"key": "loss", "how": "sum"}, {"x": ONE})
    bench.wait(20)
    bench.now += 100
    bench.core.forgive(100)
    assert not bench.wait(9)
    replies = bench.wait(2)
    assert [message.body["error"] for _, message in replies] == ["timeout", "timeout"]


def test_a_replayed_collective_that_all_trainers_have_passed_is_not_reported_as_a_wait(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bench = Bench(ServerOptions(lost_after_s=500)).started(SGD, sgd_state())
    # A server that restarted: trainer 0 replays its sum for trainer 1, which needs it no more.
    assert not bench.send(0, Kind.REDUCE, 1, {"key": "loss", "how": "sum"}, {"x": ONE})
    bench.push(0, 1, sgd_grads(0, 1))
    bench.push(0, 2, sgd_grads(0, 2))
    bench.wait(20)
    assert "waits for" not in capsys.readouterr().err  # nor does trainer 0
    bench.push(1, 1, sgd_grads(1, 1))
    (reply, again) = bench.send(1, Kind.REDUCE, 1, {"key": "loss", "how": "sum"}, {"x": ONE})
    assert reply[1].kind is again[1].kind is Kind.REDUCED  # trainer 1 had lost its reply
    assert not bench.send(0, Kind.REDUCE, 1, {"key": "other", "how": "sum"}, {"x": ONE})
    bench.push(1, 2, sgd_grads(1, 2))
    bench.wait(1)
    late = bench.send(1, Kind.REDUCE, 1, {"key": "other", "how": "sum"}, {"x": ONE})
    assert not late  # trainer 1 had passed it, so it was dropped
    bench.wait(600)
    assert "reduce" not in capsys.readouterr().err


def test_a_trainer_that_never_came_is_named() -> None:
    bench = Bench(ServerOptions(lost_after_s=500, step_timeout_s=30))
    bench.one(1, Kind.HELLO, body=hello(1))
    assert not bench.send(1, Kind.PULL, 0, {"names": ["b"]})
    assert "trainer 0 never sent a hello" in error_of(bench.wait(31))[1]


def test_a_server_that_nobody_needs_ends() -> None:
    bench = Bench(ServerOptions(step_timeout_s=30, connect_s=60))
    bench.wait(59)  # trainers may need longer to start than for a step
    assert not bench.core.finished
    bench.wait(2)
    assert bench.core.finished
    assert "no trainer ever came" in str(bench.core.failure)


def test_a_server_that_stood_still_still_waits_for_the_first_trainer() -> None:
    bench = Bench(ServerOptions(step_timeout_s=30, connect_s=30))
    bench.wait(20)
    bench.now += 100
    bench.core.forgive(100)
    bench.wait(9)
    assert not bench.core.finished
    bench.wait(2)
    assert "no trainer ever came" in str(bench.core.failure)


def test_a_trainer_that_never_came_is_named_at_the_end() -> None:
    bench = Bench(ServerOptions(step_timeout_s=30))
    bench.one(0, Kind.HELLO, body=hello(0))
    bench.one(0, Kind.BYE)
    bench.wait(31)
    assert str(bench.core.failure) == "no trainer lives: trainer 1 never came"


def test_trainers_that_disagree_on_a_reduction_are_told() -> None:
    bench = Bench().started(SGD, sgd_state())
    body = {"key": "k", "how": "sum"}
    bench.send(0, Kind.REDUCE, 1, {**body}, {"x": ONE})
    _, text = error_of(bench.send(1, Kind.REDUCE, 1, {**body}, {"x": np.ones(3, np.float32)}))
    assert "trainer 0 sent sum of [x float32[2]], trainer 1 sum of [x float32[3]]" in text


def beat(bench: Bench, trainer: int, doing: str) -> Message:
    """Sends a heartbeat, which comes on a connection of its own."""
    return bench.one(trainer, Kind.HEARTBEAT, body={"doing": doing}, peer=b"beat")


def test_where_another_may_come_in_its_place_a_refused_trainer_is_named_at_the_end() -> None:
    bench = Bench(ServerOptions(job="j", lost_after_s=500, step_timeout_s=30))
    bench.one(1, Kind.HELLO, body=hello(1))
    bench.one(2, Kind.HELLO, body=hello(0, job="another"))  # a process of another job
    assert not bench.core.trainers.refused
    bench.one(0, Kind.HELLO, body=hello(0, program="changed"))
    assert not bench.send(1, Kind.PULL, 0, {"names": ["b"]})
    assert not bench.wait(20)
    assert "trainer 0 was refused: trainer 0 reports program" in error_of(bench.wait(11))[1]


def test_a_refused_trainer_that_comes_back_right_is_waited_for() -> None:
    bench = Bench(ServerOptions(job="j", lost_after_s=500, step_timeout_s=30))
    bench.one(1, Kind.HELLO, body=hello(1))
    bench.one(0, Kind.HELLO, body=hello(0, program="changed"))
    bench.one(0, Kind.HELLO, body=hello(0))
    assert not bench.send(1, Kind.PULL, 0, {"names": ["b"]})
    assert not bench.wait(1)


def test_a_trainer_whose_servers_have_their_programs_is_refused_by_one_that_has_none() -> None:
    bench = Bench()
    answer = bench.one(0, Kind.HELLO, body=hello(0, defines=False))
    assert answer.kind is Kind.ERROR
    assert "--servers-run-script" in str(answer.body["hint"])
    assert bench.one(0, Kind.HELLO, body=hello(0, defines=True)).kind is Kind.WELCOME


def test_a_server_that_waits_for_nobody_in_a_lost_trainers_place_ends_at_once() -> None:
    bench = Bench(ServerOptions(lost_after_s=5, step_timeout_s=600, trainer_return_s=0.0))
    bench.wait(30)
    assert not bench.core.finished  # none has arrived yet
    bench.one(0, Kind.HELLO, body=hello(0))
    bench.one(0, Kind.HEARTBEAT, body={"doing": "gave up: server 1 was lost"})
    bench.wait(4)
    assert not bench.core.finished
    bench.wait(3)
    assert bench.core.finished
    words = r"no trainer lives: trainer 0, last heartbeat [\d.]+ s ago: gave up: server 1 was lost"
    assert re.search(words, str(bench.core.failure))
