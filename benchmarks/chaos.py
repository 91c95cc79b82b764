"""Random SIGKILLs of servers and trainers of a job of real processes: results, outages, pace.

    python benchmarks/chaos.py [--mode sync] [--kills 100] [--every 12] [--seed 0]
    python benchmarks/chaos.py --minutes 30 --every 20

`jaxfleet launch` runs 3 servers and 3 trainers with `--restarts`, `--spares`, and
`--trainer-restarts`; the strategy has `on_trainer_lost="wait"`. The seed draws which processes each
round kills: one, or in a fifth of the rounds two or three, at once or within 2 s. A round ends when
every trainer has ended 20 further steps; the next one begins `--every` seconds after the last
began, or then. If no round has killed a single server, or a single trainer, one more does. A server
and a trainer that are lost together may take the job back to a periodic checkpoint of its own
(`--max-restarts`, `--save-every`).

- `--mode sync`: the final states of all trainers must be those of an undisturbed job of as many
  steps, bit by bit.
- `--mode async` and `geo`: the ledger of samples must have each once in every epoch, and parameters
  and rows of a table, which count samples, must agree with it: in `async` exactly on server 0, and
  elsewhere but for the steps of the pushes that killed trainers had under way; in `geo` but for the
  changes that trainers had not sent. No step exceeds the bound of staleness.
- `--minutes`: single kills at exponential intervals of `--every` on average. The pace, counted in
  steps that were reached, is compared with that of the same job before and after.

An outage is the time from a kill to the end of the longest gap in any trainer's steps.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from chaos_training import LEASED, RELAXED, SAMPLES
from common import Bar, print_bars, print_table
from launched import LONGEST_S, LaunchedJob, Victim, ending_on_signals, import_s

SCRIPT = Path(__file__).with_name("chaos_training.py")
AHEAD = 100  # steps from the request to stop to the last one
AGAIN = 20  # steps of each trainer after which a job has recovered
SEVERAL = 0.2  # of the rounds kill two or three processes
WITHIN_S = 2.0
MOST = 100_000  # restarts
BARS_S = {"server": (2.0, 5.0), "trainer": (4.0, 8.0)}  # median and worst outage of single kills
LOST_SHARE = 0.2  # of the throughput
CALM = 0.15  # of --minutes, before and after, without kills
COPIED_S = 2.0  # a server's checkpoint has the state of so long before it was complete, at most


@dataclass(frozen=True)
class Round:
    """Kills that belong together: each victim, and the seconds after the first kill."""

    victims: tuple[tuple[Victim, float], ...]

    @property
    def kind(self) -> str:
        roles = sorted({role for (role, _), _ in self.victims})
        if len(self.victims) == 1:
            return roles[0]
        return f"several {roles[0]}s" if len(roles) == 1 else "servers and trainers"

    def __str__(self) -> str:
        return ", ".join(f"{role} {number}" for (role, number), _ in self.victims)


def draw_round(draw: random.Random, members: Sequence[Victim], *, single: bool = False) -> Round:
    """Draws a round among members, of both roles alike often if it has a single victim."""
    if single or len(members) < 2 or draw.random() >= SEVERAL:
        role = draw.choice(sorted({role for role, _ in members}))
        return Round(((draw.choice([one for one in members if one[0] == role]), 0.0),))
    chosen = draw.sample(list(members), min(draw.choice((2, 3)), len(members)))
    latest_s = draw.choice((0.0, WITHIN_S))
    return Round(tuple((victim, at * latest_s) for at, victim in enumerate(chosen)))


@dataclass
class Outages:
    """Seconds of outages, by what was killed."""

    of: dict[str, list[float]] = field(default_factory=dict)
    kills: int = 0

    @property
    def rounds(self) -> int:
        return sum(map(len, self.of.values()))

    def rows(self) -> list[list[str]]:
        return [
            [name, str(len(each)), f"{statistics.median(each):.2f}", f"{max(each):.2f}"]
            for name, each in sorted(self.of.items())
        ]

    def bars(self) -> list[Bar]:
        return [
            Bar(f"{what} outage of a {name}, s", value, bar)
            for name, (median, worst) in BARS_S.items()
            if (seconds := self.of.get(name))
            for what, value, bar in (
                ("median", statistics.median(seconds), median),
                ("worst", max(seconds), worst),
            )
        ]


@dataclass
class Unsent:
    """What killed trainers had not sent to all servers: docs/relaxed-modes.md promises no more.

    Attributes:
        trainers: how many the job has.
        mode: of communication.
        deaths: of trainers.
        steps: of trainers that a server had not saved yet which died with them.
        whole_starts: how often the whole job began again.
    """

    trainers: int
    mode: str
    deaths: int = 0
    steps: int = 0
    whole_starts: int = 0

    def samples(self, *, of_rows: bool = False) -> int:
        """Returns how many samples may be missing, or be there twice, in `async`.

        A message under way has the gradients of `merge` steps. Rows are sent at each step, so
        servers may have those of the steps that are being merged, too.
        """
        merge: int = RELAXED["async"]["merge"]
        return LEASED * (merge * (1 + of_rows) * self.deaths + self.steps)

    def changes(self, *, of_rows: bool = False) -> int:
        """Returns how many samples' changes may be missing, or be there twice, in `geo`.

        An exchange sends 1/T of a trainer's change, so at most those of T exchanges are left of it;
        and those that trainers have left at the end never arrive. The rest of a row's change is
        sent when the trainer trains that row again, so T - 1 samples of each row may be left.
        """
        left: int = LEASED * self.trainers * RELAXED["geo"]["k_steps"]
        if of_rows:
            left = SAMPLES * (self.trainers - 1)
        last = self.trainers * (1 + self.whole_starts)
        return left * (self.deaths + last) + LEASED * self.steps


class Chaos:
    """The job that is disturbed, with its folder.

    Args:
        folder: of the trainers' results.
        arguments: of the command line.
        calm: no process will be killed, and trainers do not pause.
    """

    def __init__(self, folder: Path, arguments: argparse.Namespace, *, calm: bool = False) -> None:
        folder.mkdir()
        self._folder, self._arguments = folder, arguments
        count, mode = arguments.trainers, arguments.mode
        words = [f"--job={folder.name}", "--threads=1", f"--checkpoint-dir={folder / 'own'}"]
        words += [f"--servers={arguments.servers}", f"--trainers={count}"]
        words += [f"--server-return={LONGEST_S}"]
        if not calm:
            words += [f"--restarts={MOST}", f"--spares={arguments.spares}"]
            words += [f"--trainer-restarts={MOST}", f"--max-restarts={MOST}"]
            words += [f"--save-every={arguments.save_every}"]
        pause = 0.0 if calm else arguments.pause
        words += [str(SCRIPT), f"--mode={mode}", f"--pause={pause}", str(folder)]
        self.job = LaunchedJob(words, trainers=count, output=arguments.output)
        self.members: list[Victim] = [("server", number) for number in range(arguments.servers)]
        self.members += [("trainer", number) for number in range(count)]
        if arguments.roles:
            self.members = [one for one in self.members if one[0] == arguments.roles]
        self.outages, self.unsent = Outages(), Unsent(count, mode)

    def play(self, round_: Round) -> None:
        """Kills, waits until the job has recovered, and adds the outage."""
        began = time.monotonic()
        restarts = self.job.whole_starts
        hit: list[tuple[Victim, int]] = []
        for victim, after_s in round_.victims:
            time.sleep(max(0.0, began + after_s - time.monotonic()))
            if (starts := self.job.kill(victim)) is not None:
                hit.append((victim, starts))
        self._count_unsent([victim for victim, _ in hit], began)
        for victim, starts in hit:
            self.job.wait_starts(victim, starts)
        self.job.wait_steps(time.monotonic(), AGAIN)
        outage_s = self.job.outage_s(began)
        whole = self.job.whole_starts - restarts
        self.unsent.whole_starts += whole
        kind = f"{round_.kind}, whole job again" if whole else round_.kind
        self.outages.of.setdefault(kind, []).append(outage_s)
        self.outages.kills += len(hit)
        again = ", and the job began again from its checkpoint" if whole else ""
        print(f"round {self.outages.rounds}, {round_}: {outage_s:.2f} s{again}", flush=True)

    def _count_unsent(self, killed: Sequence[Victim], began: float) -> None:
        """Counts what killed trainers had not sent, or had sent to a server that died with them."""
        trainers = [number for role, number in killed if role == "trainer"]
        self.unsent.deaths += len(trainers)
        for role, number in killed:
            if role == "server":
                since = min(began, self._saved_at(number)) - COPIED_S
                steps = (at for each in trainers for at in list(self.job.steps[each]))
                self.unsent.steps += sum(at > since for at in steps)

    def _saved_at(self, server: int) -> float:
        """Returns when the newest checkpoint of a server was complete, 0 if there is none."""
        found = [0.0]
        for path in (self._folder / "own").rglob(f"server{server}/*/*"):
            with suppress(OSError):  # it is replaced
                found.append(path.stat().st_mtime - time.time() + time.monotonic())
        return max(found)

    def progress(self) -> int:
        """The steps that were reached: of a trainer in sync mode, else of all."""
        newest = self.job.newest.values()
        return max(newest) if self._arguments.mode == "sync" else sum(newest)

    def pace(self, seconds: float) -> float:
        """Returns the steps a second in a time without kills."""
        began, before = time.monotonic(), self.progress()
        time.sleep(seconds)
        self.job.wait_steps(time.monotonic(), 1)
        return (self.progress() - before) / (time.monotonic() - began)

    def stop(self, last: int | None = None) -> int:
        """Lets the job end, in sync mode at a step, by default soon; returns that step."""
        last = last or max(self.job.newest.values()) + AHEAD
        written = self._folder / "stop.new"
        written.write_text(str(last))
        written.rename(self._folder / "stop")
        self.job.finish()
        return last

    def finals(self) -> list[dict[str, np.ndarray]]:
        """Returns what each trainer wrote at its end."""
        found = []
        for number in range(self._arguments.trainers):
            with np.load(self._folder / f"final-{number}.npz") as final:
                found.append({name: final[name] for name in final.files})
        return found

    def counted(self) -> tuple[np.ndarray, np.ndarray, Any]:
        """Returns the parameters and the rows that count samples, and the ledger's numbers."""
        with np.load(self._folder / "final.npz") as final:
            counts, rows = final["counts"], final["rows"]
        return counts, rows, json.loads((self._folder / "data.json").read_text())

    def ages(self) -> list[dict[str, int]]:
        """Returns the bound of staleness and the greatest staleness of each trainer's process."""
        return [json.loads(path.read_text()) for path in self._folder.glob("staleness-*.json")]


def disturb(chaos: Chaos, arguments: argparse.Namespace) -> None:
    """Plays rounds until there were as many kills as asked for, and a single one of each role."""
    draw, outages = random.Random(arguments.seed), chaos.outages

    def play(members: Sequence[Victim], *, single: bool) -> None:
        due = time.monotonic() + arguments.every
        chaos.play(draw_round(draw, members, single=single))
        time.sleep(max(0.0, due - time.monotonic()))

    while outages.kills < arguments.kills:
        play(chaos.members, single=False)
    for role in sorted({role for role, _ in chaos.members} - outages.of.keys()):
        play([one for one in chaos.members if one[0] == role], single=True)


def keep_pace(chaos: Chaos, arguments: argparse.Namespace) -> list[Bar]:
    """Kills single processes for some minutes; compares the throughput with that without."""
    draw, calm_s = random.Random(arguments.seed), CALM * 60 * arguments.minutes
    before = chaos.pace(calm_s)
    began, reached = time.monotonic(), chaos.progress()
    due, until = began, began + 60 * arguments.minutes
    while (due := due + draw.expovariate(1 / arguments.every)) < until:
        time.sleep(max(0.0, due - time.monotonic()))
        chaos.play(draw_round(draw, chaos.members, single=True))
    time.sleep(max(0.0, until - time.monotonic()))
    took_s = time.monotonic() - began
    pace = (chaos.progress() - reached) / took_s
    after = chaos.pace(calm_s)
    share = pace / statistics.mean((before, after))
    print(f"steps/s before, with kills and after: {before:.1f}, {pace:.1f}, {after:.1f} "
          f"({share:.0%}); a kill every {took_s / max(chaos.outages.kills, 1):.1f} s")  # fmt: skip
    return [Bar("lost share of the throughput", 1 - share, LOST_SHARE)]


def compare(chaos: Chaos, folder: Path, arguments: argparse.Namespace, last: int) -> list[Bar]:
    """Counts leaves that differ from the final state of an undisturbed job."""
    finals = chaos.finals()
    calm = Chaos(folder, arguments, calm=True)
    with calm.job:
        calm.stop(last)
    wanted = calm.finals()
    differ = sum(
        found[name].tobytes() != leaf.tobytes()
        for found in finals
        for name, leaf in wanted[0].items()
    )
    agree = all(one[name].tobytes() == wanted[0][name].tobytes() for one in wanted for name in one)
    if not agree or not all(found.keys() == wanted[0].keys() for found in finals):
        raise RuntimeError("the trainers of the undisturbed job do not agree")
    print(f"{last} steps: {differ} of {len(finals) * len(wanted[0])} leaves differ", flush=True)
    return [Bar("leaves that differ from the undisturbed job's", differ, 0)]


def account(chaos: Chaos, arguments: argparse.Namespace) -> list[Bar]:
    """Compares the ledger of samples, parameters and rows of the table; looks at staleness."""
    counts, rows, data = chaos.counted()
    listed = [each for each in data["epochs"] if each["never"] != SAMPLES]  # but one not begun
    epochs = data["earlier"]["epochs"] + len(listed)
    twice, never = (
        sum(each[name] for each in (*listed, data["earlier"])) for name in ("twice", "never")
    )
    bars = [
        Bar("samples that the ledger has twice", twice, 0),
        Bar("samples that the ledger lacks", never, 0),
        Bar("rows of the table with more than one count", _differing(rows), 0),
    ]
    if arguments.mode == "async":
        first = SAMPLES // arguments.servers  # server 0 has the first elements
        here, elsewhere, table = (
            float(np.abs(found - epochs).sum())
            for found in (counts[:first], counts[first:], rows[:, 0])
        )
        unsent = chaos.unsent
        bars += [
            Bar("samples not counted once by server 0's parameters", here, 0),
            Bar("samples not counted once by other parameters", elsewhere, unsent.samples()),
            Bar("samples not counted once by the table", table, unsent.samples(of_rows=True)),
        ]
    else:
        bars += [
            Bar(f"samples that {name} lack, or have too many of", missing, most)
            for name, found, most in (
                ("parameters", counts, chaos.unsent.changes()),
                ("rows", rows[:, 0], chaos.unsent.changes(of_rows=True)),
            )
            for missing in (abs(float(epochs * SAMPLES - found.sum(dtype=np.float64))),)
        ]
    ages = chaos.ages()
    beyond = sum(max(0, age["max"] - age["bound"]) for age in ages)
    bars.append(Bar("steps by which trainers exceeded the bound", beyond, 0))
    print(f"{epochs * SAMPLES} samples in {epochs} epochs; staleness "
          f"{sorted(age['max'] for age in ages)} of {ages[0]['bound']}", flush=True)  # fmt: skip
    return bars


def _differing(rows: np.ndarray) -> int:
    return int((rows != rows[:, :1]).any(axis=1).sum())


def measure(arguments: argparse.Namespace, folder: Path) -> list[Bar]:
    """Runs the job and, in sync mode, the undisturbed one; prints a table, and returns bars."""
    chaos, bars = Chaos(folder / "chaos", arguments), list[Bar]()
    with chaos.job:
        chaos.job.wait_steps(0.0, AGAIN)
        if arguments.minutes:
            bars += keep_pace(chaos, arguments)
        else:
            disturb(chaos, arguments)
        last = chaos.stop()
    left = [pid for pids in chaos.job.pids.values() for pid in pids if _runs(pid, folder.name)]
    bars.append(Bar("processes left behind", len(left), 0))
    if arguments.mode == "sync":
        bars += compare(chaos, folder / "calm", arguments, last)
    else:
        bars += account(chaos, arguments)
    print()
    print_table(("killed", "rounds", "median, s", "worst, s"), chaos.outages.rows())
    print(f"{chaos.outages.kills} kills; the whole job began again "
          f"{chaos.job.whole_starts} times")  # fmt: skip
    return [*chaos.outages.bars(), *bars]


def _runs(pid: int, text: str) -> bool:
    """Whether a process runs that has a text in its command or environment."""
    with suppress(OSError):
        folder = Path(f"/proc/{pid}")
        found = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
        return text.encode() in found
    return False


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The benchmark chaos.")
    add = parser.add_argument
    add("--quick", action="store_true", help="five kills, 3 s apart")
    add("--mode", choices=("sync", "async", "geo"), default="sync")
    add("--kills", type=int, default=100)
    add("--minutes", type=float, default=0.0, help="single kills for so long, instead")
    add("--every", type=float, default=12.0, help="seconds between rounds")
    add("--seed", type=int, default=0)
    add("--servers", type=int, default=3)
    add("--trainers", type=int, default=3)
    add("--spares", type=int, default=1, help="of jaxfleet launch")
    add("--save-every", default="200steps", help="of jaxfleet launch")
    add("--pause", type=float, default=0.02, help="seconds after each step of a trainer")
    add("--roles", choices=("server", "trainer"), help="kill these alone")
    add("--output", type=Path, help="file for the output of the jobs, but for their steps")
    arguments = parser.parse_args(words)
    if arguments.quick:
        arguments.kills, arguments.every = 5, 3.0
    before = import_s()
    with tempfile.TemporaryDirectory(prefix="chaos-") as name, ending_on_signals():
        bars = measure(arguments, Path(name))
    alone = import_s()
    print(f"python -c 'import jax': {before:.2f} s before, {alone:.2f} s after the jobs; "
          f"load {os.getloadavg()[1]:.1f} (5 minutes)")  # fmt: skip
    print_bars(f"chaos {arguments.mode}, seed {arguments.seed}", bars)


if __name__ == "__main__":
    main()
