"""A job's programs in fluid's text train as one process does, whichever process ends first."""

from typing import Any

import numpy as np
import pytest

from jaxfleet.errors import ClosedError, FeedError, PeerLostError, ProgramError
from jaxfleet.fluid.pserver.connections import Connection, job_info_of, serve_program
from jaxfleet.fluid.pserver.normalization import normalize_trainer
from jaxfleet.fluid.pserver.runs import why_not
from jaxfleet.fluid.pserver.trainer import TrainerRun
from jaxfleet.fluid.scope import Scope
from tests.fluid.pserver import written
from tests.fluid.pserver.memory import CACHE, Job

STEPS = 4
W = np.asarray([[0.5], [-1.0], [2.0], [0.25]], np.float32)


def batch(trainer: int, step: int, rows: int = 6) -> dict[str, np.ndarray]:
    random = np.random.default_rng([trainer, step])
    x = random.normal(size=(rows, 4)).astype(np.float32)
    return {"x": x, "y": x.sum(1, keepdims=True)}


def first_state(number: int) -> dict[str, np.ndarray]:
    """Returns the result of a server's startup program."""
    rate = np.asarray([written.RATE], np.float32)
    own = {"b": np.zeros(1, np.float32), "w.block1": W[2:]} if number == 0 else {"w.block0": W[:2]}
    return {"learning_rate_0": rate, **own}


class Person:
    """A trainer with a scope, as in an executor."""

    def __init__(self, job: Job, number: int, trainers: int = 2, digest: str = "one") -> None:
        self.number, self.scope = number, Scope()
        self._programs = [
            written.trainer_startup(number, trainers, digest),
            written.trainer(number, trainers, digest),
        ]
        self._connections = job.connections()

    @property
    def connection(self) -> Connection:
        return self._connections.get(job_info_of(self._programs[1]))

    def start(self) -> dict[str, Any]:
        startup = TrainerRun(normalize_trainer(self._programs[0], ()), self.connection, CACHE)
        startup.run({}, self.scope)
        return dict(self.scope)

    def train(self, steps: range) -> list[float]:
        plain = normalize_trainer(self._programs[1], ("loss",))
        run = TrainerRun(plain, self.connection, CACHE)
        return [float(run.run(batch(self.number, n), self.scope)["loss"][0]) for n in steps]

    def script(self, steps: int = STEPS) -> list[float]:
        self.start()
        losses = self.train(range(steps))
        self.connection.close()
        return losses


def serving(job: Job, number: int, trainers: int = 2) -> tuple[Any, Scope]:
    scope = Scope()
    scope.keep(first_state(number))
    process = job.connections()
    return lambda: serve_program(written.server(number, trainers), scope, process), scope


def one_process(trainers: int, steps: int = STEPS) -> tuple[list[list[float]], np.ndarray]:
    """Returns the losses of each trainer's rows, and the last weights, by numpy."""
    w, b = W.astype(np.float64), np.zeros(1)
    losses: list[list[float]] = [[] for _ in range(trainers)]
    for step in range(steps):
        grads = []
        for trainer in range(trainers):
            fed = batch(trainer, step)
            d = fed["x"] @ w + b - fed["y"]
            losses[trainer].append(float((d**2).mean()))
            grads.append((2 * fed["x"].T @ d / len(d), 2 * d.mean(0)))
        w = w - written.RATE * np.mean([g for g, _ in grads], 0)
        b = b - written.RATE * np.mean([g for _, g in grads], 0)
    return losses, w


@pytest.mark.parametrize("trainers", [1, 2])
def test_trainers_and_servers_train_as_one_process(trainers: int) -> None:
    job = Job()
    people = [Person(job, number, trainers) for number in range(trainers)]
    (first, state), (second, other) = serving(job, 0, trainers), serving(job, 1, trainers)
    done = job.run(
        {
            "server 0": first,
            "server 1": second,
            **{f"trainer {one.number}": one.script for one in people},
        }
    )
    losses, w = one_process(trainers)
    for one in people:
        np.testing.assert_allclose(done[f"trainer {one.number}"], losses[one.number], rtol=1e-5)
        np.testing.assert_allclose(np.asarray(one.scope["w"]), w, rtol=1e-5)
    last = np.concatenate([np.asarray(other["w.block0"]), np.asarray(state["w.block1"])])
    np.testing.assert_array_equal(last, np.asarray(people[0].scope["w"]))
    assert "w@GRAD.block1" not in state


def test_a_trainer_starts_from_what_servers_have_whenever_it_does() -> None:
    job, found = Job(), {}

    def script() -> None:
        one = Person(job, 0, 1)
        np.testing.assert_array_equal(np.asarray(one.start()["w"]), W)
        one.train(range(2))
        found["trained"] = np.asarray(one.scope["w"])
        one.scope = Scope()
        found["again"] = np.asarray(one.start()["w"])
        one.train(range(2, 3))
        one.connection.close()

    (first, _), (second, _) = serving(job, 0, 1), serving(job, 1, 1)
    job.run({"server 0": first, "server 1": second, "trainer 0": script})
    np.testing.assert_array_equal(found["again"], found["trained"])
    assert not np.array_equal(found["trained"], W)


def test_a_trainer_that_ends_early_is_not_waited_for() -> None:
    job = Job()
    long, short = Person(job, 0), Person(job, 1)
    (first, _), (second, _) = serving(job, 0), serving(job, 1)
    done = job.run(
        {
            "server 0": first,
            "server 1": second,
            "trainer 0": long.script,
            "trainer 1": lambda: short.script(2),
        }
    )
    both, _ = one_process(2, 2)
    np.testing.assert_allclose(done["trainer 0"][:2], both[0], rtol=1e-5)
    assert len(done["trainer 0"]) == STEPS
    assert all(np.isfinite(done["trainer 0"]))


def test_closing_is_the_last_thing_and_may_be_said_twice() -> None:
    job = Job()

    def script() -> None:
        one = Person(job, 0, 1)
        one.start()
        connection = one.connection
        run = TrainerRun(normalize_trainer(written.trainer(0, 1), ()), connection, CACHE)
        connection.close()
        connection.close()
        with pytest.raises(ClosedError, match="trainer 0 has closed"):
            run.run(batch(0, 0), one.scope)

    (first, _), (second, _) = serving(job, 0, 1), serving(job, 1, 1)
    job.run({"server 0": first, "server 1": second, "trainer 0": script})


def test_trainers_of_two_programs_are_told() -> None:
    job = Job()

    def script() -> None:
        Person(job, 0, 1, digest="another").start()

    (first, _), (second, _) = serving(job, 0, 1), serving(job, 1, 1)
    with pytest.raises(ProgramError, match="trainer 0 reports program another, and the server one"):
        job.run({"server 0": first, "server 1": second, "trainer 0": script})


def test_a_trainer_that_does_not_come_is_named() -> None:
    job = Job()
    one = Person(job, 0)
    (first, _), (second, _) = serving(job, 0), serving(job, 1)
    words = "trainer 1 never sent a hello; trainer 0 waited 30.* s in pull of step 1 for"
    with pytest.raises(PeerLostError, match=words):
        job.run({"server 0": first, "server 1": second, "trainer 0": one.script})


def test_what_is_not_fed_or_not_there_is_said_before_anything_is_sent() -> None:
    job = Job()

    def script() -> list[float]:
        one = Person(job, 0, 1)
        run = TrainerRun(normalize_trainer(written.trainer(0, 1), ("loss",)), one.connection, CACHE)
        with pytest.raises(FeedError, match=r"'w' .* is not in the scope"):
            run.run(batch(0, 0), one.scope)
        one.start()
        wrong = {"x": np.ones((3, 4), np.float32), "y": np.ones((2, 1), np.float32)}
        with pytest.raises(FeedError, match="'y' is fed an array of shape"):
            run.run(wrong, one.scope)
        losses = one.train(range(1))
        one.connection.close()
        return losses

    (first, _), (second, _) = serving(job, 0, 1), serving(job, 1, 1)
    done = job.run({"server 0": first, "server 1": second, "trainer 0": script})
    np.testing.assert_allclose(done["trainer 0"], one_process(1)[0][0][:1], rtol=1e-5)


def test_a_server_whose_startup_program_did_not_run_says_so() -> None:
    with pytest.raises(FeedError, match=r"'learning_rate_0' .* is not in the scope"):
        serve_program(written.server(0), Scope(), Job().connections())


def test_programs_that_wait_for_all_trainers_are_run() -> None:
    for program in (written.trainer(), written.trainer_startup(), written.server(0)):
        assert why_not(program) is None
