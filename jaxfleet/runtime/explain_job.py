"""Says in some twenty lines what was decided about a step of a parameter-server job, and why."""

from collections.abc import Iterator
from itertools import pairwise

from jaxfleet.analysis.plan import transfer_plan
from jaxfleet.capture import Captured
from jaxfleet.lower.segments import runs_on_host
from jaxfleet.runtime.explain import about_capture, about_notes, about_passes
from jaxfleet.runtime.job_programs import JobPrograms
from jaxfleet.runtime.strategy import DistributedStrategy


def explain_job(captured: Captured, strategy: DistributedStrategy, job: JobPrograms) -> str:
    """Returns the explanation of a step that trainers and servers share."""
    lines = [
        *about_capture(captured),
        *_about_processes(captured, strategy, job),
        *_about_travel(job),
        *([] if job.is_whole else about_notes(job.trainer, job.dumps)),
        about_passes(job.dumps),
    ]
    return "\n".join([lines[0], *(f"  {line}" for line in lines[1:])])


def _about_processes(
    captured: Captured, strategy: DistributedStrategy, job: JobPrograms
) -> Iterator[str]:
    trainers, rows = job.trainers, captured.signature.rows
    share = rows if job.is_whole or strategy.batch == "local" else rows // trainers
    yield f"{trainers} trainers, {share} of {rows} rows on each; {len(job.servers)} servers"
    if job.is_whole and trainers > 1:
        yield (
            "every trainer computes the whole batch: sums over it stand inside a loop, where a "
            "trainer cannot wait for the others"
        )
    ops = job.trainer.root.ops
    waits = sum(
        runs_on_host(op) and op.type not in {"split_byref", "send", "fetch"}
        and not runs_on_host(before)
        for before, op in pairwise(ops)
    )  # fmt: skip
    first = any(op.type == "send" for op in ops)
    yield f"a step waits for servers {max(waits, int(first))} times"


def _about_travel(job: JobPrograms) -> Iterator[str]:
    placed = job.dumps["dispatch"].after
    plan = transfer_plan(placed, trainers=job.trainers, trainer=job.trainer)
    yield from plan.summary()
