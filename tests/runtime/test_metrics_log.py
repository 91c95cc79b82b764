"""A step's metrics go to a writer or a TensorBoard folder, in order, and no step waits for them."""

import logging
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tensorboardX.crc32c import crc32c
from tensorboardX.proto.event_pb2 import Event

import jaxfleet as jf
from jaxfleet.errors import StrategyError
from jaxfleet.runtime.metrics_log import MetricsLog, MetricsWriter, TensorBoardWriter
from jaxfleet.runtime.scalar_metrics import MOST_METRICS, ScalarMetrics
from jaxfleet.runtime.trainer_step import TrainerStep
from tests.cluster.ranks import LONGEST_S, ranks
from tests.runtime.test_scalar_metrics import Computing
from tests.runtime.toys import rows, start, training

ROOT = Path(__file__).resolve().parents[2]
TX = jf.distributed_optimizer(optax.sgd(0.1))
BATCH = rows(8)
NAMES = ("metrics/x",)


class Kept:
    """A writer as clu's are, which keeps what it is given."""

    def __init__(self) -> None:
        self.written: list[tuple[int, dict[str, float]]] = []
        self.flushes = 0

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        self.written.append((step, dict(scalars)))

    def flush(self) -> None:
        self.flushes += 1

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.written]


class Failing(Kept):
    """A writer that fails for some steps."""

    def __init__(self, steps: Sequence[int]) -> None:
        super().__init__()
        self.failing = steps

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        if step in self.failing:
            raise OSError("disk full")
        super().write_scalars(step, scalars)

    def __repr__(self) -> str:
        return "Failing()"


def distributed(mode: Any = "single", **fields: Any) -> Any:
    strategy = jf.DistributedStrategy(mode=mode, **fields)
    return jf.distribute(training(TX), (start(TX), BATCH), strategy)


def trained(step: Any, count: int, state: Any = None) -> list[float]:
    state, losses = start(TX) if state is None else state, []
    for _ in range(count):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    return losses


def own(scalars: Mapping[str, float]) -> dict[str, float]:
    """The step's metrics without its statistics."""
    return {name: value for name, value in scalars.items() if not name.startswith("jaxfleet/")}


@pytest.mark.parametrize("mode", ["single", "collective"])
def test_every_second_step_is_written_in_order(mode: str) -> None:
    writer = Kept()
    with distributed(mode) as step:
        step.log_to(writer, every=2)
        losses = trained(step, 5)
    assert [(n, own(scalars)) for n, scalars in writer.written] == [
        (2, {"loss": losses[1]}),
        (4, {"loss": losses[3]}),
    ]
    assert writer.flushes == 1


def test_a_step_reports_its_statistics() -> None:
    writer = Kept()
    with distributed() as step:
        step.log_to(writer)
        trained(step, 3)
    assert [scalars["jaxfleet/compilations"] for _, scalars in writer.written] == [1, 1, 1]
    assert "jaxfleet/steps_per_second" not in writer.written[0][1]  # it would be of compiling
    assert all(scalars["jaxfleet/steps_per_second"] > 0 for _, scalars in writer.written[1:])


def test_statistics_may_be_left_out() -> None:
    writer = Kept()
    with distributed() as step:
        step.log_to(writer, statistics=False)
        trained(step, 1)
    assert writer.written[0][1].keys() == {"loss"}


def test_the_loss_scale_is_that_after_the_step() -> None:
    writer, scales = Kept(), []
    with distributed("single", amp="float16", loss_scale=8.0, loss_scale_steps=2) as step:
        step.log_to(writer)
        state = start(TX)
        for _ in range(5):
            state, _ = step(state, BATCH)
            scales.append(step.stats()["held"]["amp.scale"])
    assert [scalars["jaxfleet/loss_scale"] for _, scalars in writer.written] == scales
    assert len(set(scales)) > 1


def test_a_log_begins_in_the_middle_and_ends_before_the_step() -> None:
    writer = Kept()
    step = distributed()
    trained(step, 2)
    with step.log_to(writer):
        trained(step, 2)
    trained(step, 2)
    assert writer.steps == [3, 4]


def test_several_logs_are_independent() -> None:
    one, other = Kept(), Kept()
    with distributed() as step:
        step.log_to(one)
        step.log_to(other, every=3)
        trained(step, 3)
    assert (one.steps, other.steps) == ([1, 2, 3], [3])


def test_steps_are_counted_from_those_before() -> None:
    writer = Kept()
    with distributed() as step:
        step.log_to(writer, start=1000)
        trained(step, 2)
    assert writer.steps == [1001, 1002]


def test_steps_are_counted_from_a_restored_checkpoint(tmp_path: Path) -> None:
    writer, step = Kept(), distributed("single", donate=False)
    step.save(tmp_path / "saved", start(TX), number=40)
    with distributed() as again:
        again.log_to(writer)
        trained(again, 1, again.restore(tmp_path / "saved"))
    assert writer.steps == [41]


def log(writer: MetricsWriter | None, every: int = 1) -> tuple[ScalarMetrics, MetricsLog]:
    scalars, made = ScalarMetrics(), MetricsLog(writer, every=every)
    scalars.listeners.append(made)
    return scalars, made


def test_values_that_come_late_are_written_in_order_and_not_waited_for() -> None:
    writer = Kept()
    scalars, made = log(writer)
    slow = [Computing(float(n)) for n in range(3)]
    for value in slow:
        scalars.note([value], NAMES)
    assert writer.written == []
    slow[1].done = True
    scalars.note([4.0], NAMES)
    assert writer.written == []  # the first is still computed
    slow[0].done = True
    scalars.note([5.0], NAMES)
    assert [own(x) for _, x in writer.written] == [{"x": 0.0}, {"x": 1.0}]
    slow[2].done = True
    made.close()
    assert writer.steps == [1, 2, 3, 4, 5]


def test_a_step_that_is_still_running_is_not_waited_for() -> None:
    """The step takes some tenths of a second, and its call returns at once."""

    def slow(state: Any, batch: Any) -> Any:
        product = jax.lax.fori_loop(0, 20, lambda _, x: jnp.tanh(x @ batch), state)
        return product, {"sum": product.sum()}

    batch, writer = jnp.ones((1000, 1000)) / 1000, Kept()
    step: Any = jf.distribute(
        slow, (batch, batch), jf.DistributedStrategy(mode="single", donate=False)
    )
    state, metrics = step(batch, batch)
    jax.block_until_ready(metrics)
    with step.log_to(writer):
        _, metrics = step(state, batch)
        assert not metrics["sum"].is_ready()
        assert writer.steps == []
    assert writer.steps == [2]
    assert own(writer.written[0][1]) == {"sum": float(metrics["sum"])}


def test_all_but_scalars_is_left_out() -> None:
    writer = Kept()
    scalars, made = log(writer)
    scalars.note([np.zeros(2), jax.random.key(0)], ("metrics/rows", "metrics/key"))
    scalars.note([jnp.zeros(2), 1.0], ("metrics/rows", "metrics/x"))
    made.close()
    assert [(n, own(x)) for n, x in writer.written] == [(2, {"x": 1.0})]


def test_scalars_beyond_the_limit_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    names = tuple(f"metrics/m{n}" for n in range(MOST_METRICS + 3))
    scalars, made = log(Kept())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            scalars.note([1.0] * len(names), names)
    made.close()
    assert caplog.messages == ["jaxfleet: the step returns 3 more scalar metrics than can be kept"]


def test_a_metric_of_a_statistics_name_is_the_users() -> None:
    writer = Kept()
    scalars, made = log(writer)
    scalars.note([1.0], NAMES)
    scalars.note([-1.0], ("metrics/jaxfleet/steps_per_second",))
    made.close()
    assert writer.written[1][1]["jaxfleet/steps_per_second"] == -1.0


def test_a_writer_that_fails_is_named_once_with_its_step_and_training_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    writer = Failing([2, 3])
    with caplog.at_level(logging.WARNING), distributed() as step:
        made = step.log_to(writer)
        trained(step, 4)
        assert len(caplog.messages) == 1
    assert writer.steps == [1, 4]
    said = "Failing() could not write the metrics of step 2: OSError: disk full"
    assert said in caplog.messages[0]
    assert "Failing() failed 2 times" in caplog.messages[1]
    assert made.failures == 2


def test_a_writer_that_cannot_be_shown_either_does_not_end_the_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Unshown(Failing):
        def __repr__(self) -> str:
            raise ValueError("no name")

    writer = Unshown([2])
    with caplog.at_level(logging.WARNING), distributed() as step:
        step.log_to(writer)
        trained(step, 3)
    assert writer.steps == [1, 3]
    assert "Unshown could not write the metrics of step 2: OSError: disk full" in caplog.messages[0]


def test_a_writer_without_flush_will_do() -> None:
    class Bare:
        def __init__(self) -> None:
            self.steps: list[int] = []

        def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
            assert scalars
            self.steps.append(step)

    writer = Bare()
    with distributed() as step:
        step.log_to(writer).flush()
        trained(step, 1)
    assert writer.steps == [1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": 0}, "every is 0"),
        ({"every": 1.5}, "every is 1.5"),
        ({"every": True}, "every is True"),
        ({"start": -1}, "start is -1"),
    ],
)
def test_options_are_checked(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=said):
        distributed().log_to(tmp_path / "runs", **options)
    assert not (tmp_path / "runs").exists()


def test_what_is_no_writer_is_refused() -> None:
    with pytest.raises(StrategyError, match="neither a folder nor has a method write_scalars"):
        distributed().log_to(print)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        distributed().log_to(tmp_path / "file" / "runs")


def test_without_the_extra_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX.event_file_writer", None)
    with pytest.raises(StrategyError, match="need tensorboardX") as raised:
        distributed().log_to(tmp_path / "runs")
    assert raised.value.hint is not None
    assert "jaxfleet[metrics]" in raised.value.hint


def events(file: Path) -> list[Event]:
    """Reads an event file: records with their length and checksums (masked CRC-32C)."""
    data, found = file.read_bytes(), []
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        head, body = struct.unpack("<I", data[8:12])[0], data[12 : 12 + size]
        assert head == masked(data[:8])
        assert struct.unpack("<I", data[12 + size : 16 + size])[0] == masked(body)
        found.append(Event.FromString(body))
        data = data[16 + size :]
    return found


def masked(data: bytes) -> int:
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def scalars_in(folder: Path) -> dict[int, dict[str, float]]:
    (file,) = folder.iterdir()
    first, *rest = events(file)
    assert first.file_version == "brain.Event:2"
    return {x.step: {v.tag: v.simple_value for v in x.summary.value} for x in rest}


def test_a_folder_gets_an_event_file_of_tensorboards(tmp_path: Path) -> None:
    with distributed() as step:
        step.log_to(tmp_path / "runs" / "one", every=2)
        losses = trained(step, 5)
    found = scalars_in(tmp_path / "runs" / "one")
    assert {n: own(x) for n, x in found.items()} == {
        2: {"loss": np.float32(losses[1])},
        4: {"loss": np.float32(losses[3])},
    }


def test_hostile_names_come_back_as_text(tmp_path: Path) -> None:
    scalars, made = log(TensorBoardWriter(tmp_path))
    names = (
        "metrics/<script>alert(1)</script>",
        "metrics/a\nb",
        "metrics/\ud800",
        "metrics/ü 損失",
    )
    scalars.note([1.0, 2.0, float("nan"), 4.0], names)
    made.close()
    found = scalars_in(tmp_path)[1]
    assert list(own(found)) == ["<script>alert(1)</script>", "a?b", "?", "ü 損失"]
    assert np.isnan(found["?"])


def test_a_running_steps_metrics_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxfleet.runtime.metrics_log._FLUSH_S", 0.0)
    scalars, made = log(TensorBoardWriter(tmp_path))
    scalars.note([1.0], NAMES)
    assert own(scalars_in(tmp_path)[1]) == {"x": 1.0}
    made.close()


def test_two_logs_of_one_second_may_share_a_folder(tmp_path: Path) -> None:
    with distributed() as step:
        step.log_to(tmp_path)
        step.log_to(tmp_path)
        trained(step, 1)
    assert len([len(events(file)) for file in tmp_path.iterdir()]) == 2


@pytest.mark.few(2)
@pytest.mark.parametrize("communication", ["sync", "async", "geo"])
@pytest.mark.parametrize("only_first", [True, False])
def test_the_first_trainer_of_servers_writes_unless_all_are_to(
    communication: Any, only_first: bool
) -> None:
    writers: dict[int, Kept] = {}

    def script(step: TrainerStep) -> tuple[Any, tuple[Any, ...]]:
        writer = writers[step.client.me.trainer] = Kept()
        step.log_to(writer, only_first=only_first)
        losses = trained(step, 3)
        return losses, ()

    strategy = jf.DistributedStrategy(communication=communication, k_steps=2)
    ends = jf.Twin(training(TX), (start(TX), BATCH), strategy).play(script).states
    for trainer, losses in enumerate(ends):
        if trainer and only_first:
            assert writers[trainer].written == []
            continue
        written = writers[trainer].written
        assert [(n, own(x)) for n, x in written] == [
            (n + 1, {"loss": loss}) for n, loss in enumerate(losses)
        ]
        last = written[-1][1]
        assert last["jaxfleet/sent_bytes"] > 0
        assert last["jaxfleet/received_bytes"] > 0
        assert ("jaxfleet/staleness/mean" in last) == (communication != "sync")


@pytest.mark.grid
def test_a_process_that_ends_without_closing_loses_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.runtime.logs_without_closing", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=LONGEST_S)
    assert list(scalars_in(tmp_path)) == [1, 2, 3]


@pytest.mark.grid
@pytest.mark.processes
def test_the_first_of_two_ranks_writes(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    script = ROOT / "examples" / "tensorboard.py"
    command: list[str | Path] = [script, "--folder", folder, "--steps", "25"]
    with ranks(command, tmp_path, count=2) as started:
        for rank in started:
            assert rank.process.wait(LONGEST_S) == 0
    found = scalars_in(folder)
    assert list(found) == [10, 20]
    assert all(own(x).keys() == {"loss", "train/accuracy", "train/norm"} for x in found.values())


def test_a_fork_writes_nothing_into_the_log_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, scalars = Kept(), ScalarMetrics()
    log = MetricsLog(writer, every=1)
    scalars.listeners.append(log)
    late = Computing(1.0)
    scalars.note([late], NAMES)
    late.done = True
    with monkeypatch.context() as forked:
        forked.setattr("os.getpid", lambda: -1)
        scalars.note([2.0], NAMES)
        log.flush()
        log.close()
    assert (writer.written, writer.flushes) == ([], 0)
    log.close()
    assert writer.written == [(1, {"x": 1.0})]
