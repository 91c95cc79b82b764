"""The six faults of docs/faults.md, played on a small job of another system, or of jaxfleet.

    python benchmarks/faults.py torch --python PEER/bin/python [--faults trainer line]

The job has two trainers and, where the system has them, two servers, on two hosts of this machine:
network namespaces, whose line can be cut. It trains 400 steps of the same small network in every
system and saves a checkpoint every 25 steps on a disk of 64 MB, as the system's guide shows it.
Root and iproute2 are needed, and an environment with the system, whose interpreter `--python` is.

After step 112 comes one fault:

- server, trainer, both: SIGKILL of the processes. Where the system has no launcher that starts a
  trainer again, this program does so 5 s later.
- line: for 10 s, a bridge drops all packets of the second host without a word.
- disk: for 10 s, the disk of the checkpoints is full, and whatever is freed on it is taken.
- everything: SIGKILL of all processes.

A job that has ended, or not got further for `--patience` seconds, is launched again, as a person or
a cluster manager would. An outage is the longest time after the fault without a further step; steps
that are computed again are not further ones. The final state is compared with an undisturbed job's.
"""

import argparse
import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from launched import ending_on_signals
from systems import task
from systems.hosts import Hosts, SmallDisk
from systems.jobs import Job, environment, outage_s, repeated
from systems.launches import SYSTEMS, System

FAULTS = ("server", "trainer", "both", "line", "disk", "everything")
FAULT_STEP = 112
LASTS_S = 10.0  # of a cut line and a full disk
STARTED_AGAIN_S = 5.0
LAUNCHES = 4  # the most
LINE = 1  # the host whose line is cut

State = dict[str, np.ndarray]


@dataclass(frozen=True)
class Outcome:
    """What was seen of one fault.

    Attributes:
        launches: of the job by this program, in all.
        ends: how launches ended before the last, with seconds after the fault.
        outage_s: see above; None if the job was never done.
        again: steps that were computed again.
        state: how the final state differs from an undisturbed job's.
    """

    fault: str
    launches: int
    ends: tuple[str, ...]
    outage_s: float | None
    again: int
    state: str

    def __str__(self) -> str:
        went_on = ", ".join(self.ends) or "went on"
        times = "once" if self.launches == 1 else f"{self.launches} times"
        outage = "no end" if self.outage_s is None else f"outage {self.outage_s:.1f} s"
        return (
            f"{self.fault}: {went_on}; launched {times}; {outage}; "
            f"{self.again} steps again; {self.state}"
        )


class Playground:
    """A system, and where its jobs run.

    Args:
        system: what runs them.
        python: the interpreter of its environment.
        hosts: where.
        folder: of all jobs.
        patience_s: how long a job may not get further.
    """

    def __init__(
        self, system: System, python: str, hosts: Hosts, folder: Path, patience_s: float
    ) -> None:
        self._system, self._python, self._hosts = system, python, hosts
        self._folder, self._patience_s = folder, patience_s
        self._calm: list[State] = []

    def calm(self, name: str) -> None:
        """Runs an undisturbed job, and keeps its final state."""
        with ExitStack() as stack:
            job, _ = self._job(name, stack)
            job.launch()
            how, _ = job.wait_end(self._patience_s)
            if how != "finished":
                raise RuntimeError(f"the undisturbed job {how}: {job.last_lines()}")
            self._calm.append(_final(job))

    def repeats(self) -> bool:
        """Whether undisturbed jobs have the same final state, bit by bit."""
        first, *others = self._calm
        return all(one[name].tobytes() == first[name].tobytes() for one in others for name in first)

    def play(self, fault: str) -> Outcome:
        """Plays one fault, until the job is done."""
        with ExitStack() as stack:
            job, disk = self._job(fault, stack)
            job.launch()
            job.wait_step(FAULT_STEP)
            at = time.monotonic()
            thread = threading.Thread(target=self._strike, args=(fault, job, disk))
            thread.start()
            if fault == "everything":
                thread.join()
            ends: list[str] = []
            how, ended = job.wait_end(self._patience_s)
            thread.join()
            if how != "finished":
                job.end()  # what was started again after the job had ended
            while how != "finished" and len(ends) < LAUNCHES - 1:
                ends.append(f"{how} after {ended - at:.1f} s")
                job.launch()
                how, ended = job.wait_end(self._patience_s)
            if how == "finished":
                state, outage = self._compared(_final(job)), outage_s(job.events("step"), at)
            else:
                state, outage = f"{how} after {ended - at:.1f} s, no final state", None
            again = repeated(job.events(), at)
        return Outcome(fault, len(ends) + 1, tuple(ends), outage, again, state)

    def _job(self, name: str, stack: ExitStack) -> tuple[Job, SmallDisk]:
        folder = self._folder / name
        saves = folder / "saves"
        saves.mkdir(parents=True)
        disk = stack.enter_context(SmallDisk(saves))
        given = environment(folder, saves) | dict(self._system.environment)
        job = Job(self._system.members(self._python, saves), self._hosts, folder, given)
        stack.callback(job.end)
        return job, disk

    def _strike(self, fault: str, job: Job, disk: SmallDisk) -> None:
        if fault == "everything":
            self._hosts.kill_all()
        elif fault == "line":
            with self._hosts.line_cut(LINE):
                time.sleep(LASTS_S)
        elif fault == "disk":
            with disk.full():
                time.sleep(LASTS_S)
        else:
            victims = self._system.victims[fault]
            for victim in victims:
                job.kill(victim)
            time.sleep(STARTED_AGAIN_S)
            for victim in victims:
                if victim in self._system.started_again:
                    job.start(victim)

    def _compared(self, found: State) -> str:
        wanted = self._calm[0]
        lost = max(int(np.sum(found[name] < wanted[name])) for name in task.COUNTS)
        twice = max(int(np.sum(found[name] > wanted[name])) for name in task.COUNTS)
        counts = f"{lost} steps lost, {twice} applied twice"
        if all(found[name].tobytes() == wanted[name].tobytes() for name in wanted):
            return f"{counts}, bitwise the undisturbed state"
        dense = [name for name in wanted if name not in task.COUNTS]
        apart = max(float(np.max(np.abs(found[name] - wanted[name]))) for name in dense)
        return f"{counts}, parameters differ by up to {apart:.2g}"


def _final(job: Job) -> State:
    with np.load(job.folder / "final.npz") as final:
        return {name: final[name] for name in final.files}


def version_of(package: str, python: str) -> str:
    """Returns the version of a package as pip reports it: Python 3.7 has no metadata to ask."""
    done = subprocess.run(
        [python, "-m", "pip", "show", package],
        check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.stdout.split("Version: ")[1].split()[0]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The benchmark faults.")
    add = parser.add_argument
    add("system", choices=SYSTEMS)
    add("--python", required=True, help="the interpreter of an environment with the system")
    add("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    add("--undisturbed", type=int, default=2, help="jobs to compare with, the first above all")
    add("--patience", type=float, default=120.0, help="seconds that a job may not get further")
    add("--keep", type=Path, help="an empty folder for the jobs' logs and results")
    arguments = parser.parse_args(words)
    system = SYSTEMS[arguments.system]
    possible = {*system.victims, *(["line"] if system.line else []), "disk", "everything"}
    played = [fault for fault in arguments.faults if fault in possible]
    with ExitStack() as stack:
        stack.enter_context(ending_on_signals())
        folder = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hosts = stack.enter_context(Hosts())
        ground = Playground(system, arguments.python, hosts, folder, arguments.patience)
        for number in range(arguments.undisturbed):
            ground.calm(f"undisturbed-{number}")
        repeats = ground.repeats()
        print(f"{arguments.undisturbed} undisturbed jobs, bitwise equal: {repeats}", flush=True)
        outcomes = []
        for fault in played:
            outcomes.append(ground.play(fault))
            print(f"{outcomes[-1]}; load {os.getloadavg()[0]:.1f}", flush=True)
    print(
        json.dumps(
            {
                "name": f"faults {arguments.system}",
                "version": version_of(system.package, arguments.python),
                "undisturbed_repeats": repeats,
                "outcomes": [vars(outcome) for outcome in outcomes],
                "bars": [],
            }
        )
    )


if __name__ == "__main__":
    main()
