"""Explanation of a step of a parameter-server job, in some twenty lines."""

from collections.abc import Iterator

from jaxfleet.analysis.placement.transfer_plan import transfer_plan
from jaxfleet.capture import Captured
from jaxfleet.ir import Program
from jaxfleet.lower.partition import count_waits
from jaxfleet.passes.pserver.trainer_split import update_obstacle
from jaxfleet.pipeline import Record
from jaxfleet.ps.client.communicator import CommunicationMode
from jaxfleet.runtime.explain import (
    about_capture,
    about_notes,
    about_parts,
    about_passes,
    undivided,
    why_undivided,
)
from jaxfleet.runtime.pserver_job import JobPrograms, holds_sum
from jaxfleet.strategy import DistributedStrategy


def about_mode(trainer: Program, trainers: int) -> Iterator[str]:
    """Describes the communication mode of a trainer's program in a job of `trainers`."""
    mode = CommunicationMode.of(trainer)
    if mode is None:
        yield "communication sync: all trainers wait for each other at every step, as on one device"
        return
    how = {
        "async": "gradients are sent as soon as they are computed, and no trainer waits; up to "
        f"{mode.merge} (merge) are added up in one message while an answer is pending",
        "half_async": f"one message has the mean of the gradients of {mode.merge} steps (merge), "
        "and the trainer waits for its answer",
        "dc_asgd": "trainers wait for the answer to each gradient; servers correct it by "
        f"{trainer.attrs.get('compensation')} g g (w - w'), w' what its trainer last received",
        "geo": f"trainers update on their own; every {mode.k_steps} steps (k_steps) they send "
        f"1/{trainers} of their change",
        "fl": f"trainers update on their own; every {mode.k_steps} steps (k_steps) they send "
        "their parameters and go on with the mean",
    }
    yield f"communication {mode.communication}: {how[mode.communication]}"
    if mode.averages_state:
        yield f"values are at most {mode.k_steps - 1} steps old: an exchange waits for all"
        return
    yield (
        f"staleness {mode.staleness}: a step sees all that every trainer sent up to "
        f"{mode.staleness + 1} steps before; a trainer further ahead waits for the slowest"
    )


def explain_job(captured: Captured, strategy: DistributedStrategy, job: JobPrograms) -> str:
    """Returns the explanation of a step that trainers and servers share."""
    lines = [
        *about_capture(captured),
        *_about_processes(captured, strategy, job),
        *about_mode(job.trainer, job.trainers),
        *_about_travel(job, _share(captured, strategy, job)),
        *([] if job.is_whole else about_notes(job.trainer, job.dumps)),
        about_passes(job.dumps),
    ]
    return "\n".join([lines[0], *(f"  {line}" for line in lines[1:])])


def undivided_job(dumps: Record) -> str | None:
    """Returns why every trainer computes all of a training step, and a remedy.

    None if trainers divide it, or are not meant to: a single one, or in a relaxed mode.
    """
    stages = [stage for stage in dumps if stage.name == "grad_allreduce"]
    return undivided(stages[0].after, dumps) if stages else None


def _why_undivided(dumps: Record) -> str | None:
    stages = [stage for stage in dumps if stage.name == "grad_allreduce"]
    return why_undivided(stages[0].after, dumps) if stages else None


def _about_processes(
    captured: Captured, strategy: DistributedStrategy, job: JobPrograms
) -> Iterator[str]:
    trainers, rows = job.trainers, captured.signature.rows
    share = _share(captured, strategy, job)
    why = None if job.is_whole else _why_undivided(job.dumps)
    parts = "" if why is not None else f", {share} of {rows} rows on each"
    yield f"{trainers} trainers{parts}; {len(job.servers)} servers"
    if why is not None:
        yield f"every trainer computes the whole batch: {why}"
    if job.is_whole and trainers > 1:
        op = holds_sum(captured.program, strategy, trainers)
        kind = op.type.removeprefix("jax.")
        what = "a branch for each platform" if op.attrs.get("platforms") else f"'{kind}'"
        yield (
            f"every trainer computes the whole batch: values of all rows are needed inside {what} "
            f"({op.source.place()}), where a trainer cannot wait for the others"
        )
    yield from _about_updates(job)
    yield from about_parts(job.trainer)
    if strategy.communication != "sync":  # otherwise the mode defines what is waited for
        return
    waits = count_waits(job.trainer)
    yield f"a step waits for servers {waits} time{'s' * (waits != 1)}"


def _about_updates(job: JobPrograms) -> Iterator[str]:
    if all(stage.name != "update_on_trainers" for stage in job.dumps):
        return
    stage = job.dumps["update_on_trainers"]
    why = update_obstacle(stage.before) if stage.after is not stage.before else None
    if why is not None:
        yield (
            "every trainer runs the optimizer on gradients that servers add up, and holds all of "
            f"its state: {why.headline}"
        )


def _about_travel(job: JobPrograms, rows: int) -> Iterator[str]:
    placed = job.dumps["dispatch"].after
    plan = transfer_plan(placed, trainers=job.trainers, trainer=job.trainer, rows=rows)
    yield from plan.summary()


def _share(captured: Captured, strategy: DistributedStrategy, job: JobPrograms) -> int:
    rows = captured.signature.rows
    return rows if job.is_whole or strategy.batch == "local" else rows // job.trainers
