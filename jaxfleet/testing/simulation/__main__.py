"""Plays schedules: `python -m jaxfleet.testing.simulation --seed 7`."""

import argparse
import logging
import sys
import time
from collections.abc import Sequence

from jaxfleet.testing.simulation.runner import check, explore
from jaxfleet.testing.simulation.schedule import draw_schedule


def main(argv: Sequence[str] | None = None) -> int:
    """Plays one schedule, or a range of them; returns 1 if an invariant is broken."""
    parser = argparse.ArgumentParser(prog="python -m jaxfleet.testing.simulation")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--seed", type=int, help="play the schedule of this seed")
    what.add_argument("--seeds", type=_range, help="play a range of seeds, such as 0:1000")
    parser.add_argument("--without", type=_numbers, default=set(), help="faults to leave out: 0,3")
    parser.add_argument("--trace", action="store_true", help="print every message")
    args = parser.parse_args(argv)
    logging.getLogger("jaxfleet").setLevel(logging.WARNING if args.trace else logging.ERROR)
    if args.seeds is not None:
        return _play_all(args.seeds)
    return _play(args.seed, args.without, trace=args.trace)


def _play(seed: int, without: set[int], *, trace: bool) -> int:
    schedule = draw_schedule(seed).without(without)
    _print(str(schedule))
    run, found = check(schedule, _print if trace else None)
    for name, error in [
        *((f"trainer {number}", error) for number, error in sorted(run.errors.items())),
        *((f"server {number}", end.error) for number, end in enumerate(run.servers)),
    ]:
        if error is not None:
            _print(f"  {name} ended with {type(error).__name__}: {error}")
    _print(f"  {run.took_s:.2f} s simulated, {run.messages} messages, digest {run.digest}")
    for what in found:
        _print(f"  breaks: {what}")
    return int(bool(found))


def _play_all(seeds: range) -> int:
    began, failures = time.perf_counter(), 0
    for failure in explore(seeds):
        failures += 1
        _print(str(failure))
    took_s = time.perf_counter() - began
    pace = len(seeds) / max(took_s, 1e-9)
    _print(f"{len(seeds)} schedules in {took_s:.1f} s ({pace:.1f} a second), {failures} failed")
    return int(bool(failures))


def _range(text: str) -> range:
    first, _, last = text.partition(":")
    return range(int(first), int(last))


def _numbers(text: str) -> set[int]:
    return {int(number) for number in text.split(",") if number}


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
