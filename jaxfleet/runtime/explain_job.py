"""Says in some twenty lines what was decided about a step of a parameter-server job, and why."""

from collections.abc import Iterator

from jaxfleet.analysis.plan import transfer_plan
from jaxfleet.capture import Captured
from jaxfleet.lower.segments import count_waits
from jaxfleet.passes._update_obstacle import update_obstacle
from jaxfleet.pipeline import Record
from jaxfleet.runtime.explain import (
    about_capture,
    about_notes,
    about_parts,
    about_passes,
    undivided,
)
from jaxfleet.runtime.explain_mode import about_mode
from jaxfleet.runtime.job_programs import JobPrograms, holds_sum
from jaxfleet.runtime.strategy import DistributedStrategy


def explain_job(captured: Captured, strategy: DistributedStrategy, job: JobPrograms) -> str:
    """Returns the explanation of a step that trainers and servers share."""
    lines = [
        *about_capture(captured),
        *_about_processes(captured, strategy, job),
        *about_mode(job.trainer, job.trainers),
        *_about_travel(job),
        *([] if job.is_whole else about_notes(job.trainer, job.dumps)),
        about_passes(job.dumps),
    ]
    return "\n".join([lines[0], *(f"  {line}" for line in lines[1:])])


def undivided_job(dumps: Record) -> str | None:
    """Returns why every trainer does all of a step that trains, and what to write instead.

    None where trainers divide it, and where none of them is to: one alone, or in a relaxed mode.
    """
    stages = [stage for stage in dumps if stage.name == "grad_allreduce"]
    return undivided(stages[0].after, dumps) if stages else None


def _about_processes(
    captured: Captured, strategy: DistributedStrategy, job: JobPrograms
) -> Iterator[str]:
    trainers, rows = job.trainers, captured.signature.rows
    share = rows if job.is_whole or strategy.batch == "local" else rows // trainers
    yield f"{trainers} trainers, {share} of {rows} rows on each; {len(job.servers)} servers"
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
    if strategy.communication != "sync":  # what is waited for then, the mode says
        return
    waits = count_waits(job.trainer)
    yield f"a step waits for servers {waits} time{'s' * (waits != 1)}"


def _about_updates(job: JobPrograms) -> Iterator[str]:
    """Says why trainers run the optimizer, where they do."""
    if all(stage.name != "update_on_trainers" for stage in job.dumps):
        return
    stage = job.dumps["update_on_trainers"]
    why = update_obstacle(stage.before) if stage.after is not stage.before else None
    if why is not None:
        yield (
            "every trainer runs the optimizer on gradients that servers add up, and holds all of "
            f"its state: {why.headline}"
        )


def _about_travel(job: JobPrograms) -> Iterator[str]:
    placed = job.dumps["dispatch"].after
    plan = transfer_plan(placed, trainers=job.trainers, trainer=job.trainer)
    yield from plan.summary()
