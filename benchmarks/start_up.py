"""Processor time of imports and of commands that print text.

    python benchmarks/start_up.py [--quick]

Each sample is a fresh process; A, B and A again take turns. `import jaxfleet` is the import that a
script writes first: public names are imported on first access, so the line for `jf.distribute`
shows what a training script pays in all.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from common import Bar, median_interval, print_bars, print_table

JAX = "import jax, optax"
IMPORTS = {
    "import jaxfleet": f"{JAX}, jaxfleet",
    "jf.distribute": f"{JAX}, jaxfleet; jaxfleet.distribute",
}
PROGRAM = """\
program p
  data  x: f32[4]
  param w: f32[4]
  block 0
    forward
      w = jax.add(w, x)
"""
COMMANDS = (
    "--help",
    "passes",
    "opt --passes=dce {0}",
    "diff {0} {0}",
    "top --help",
    "timeline --help",
)
HEADS = ("", "CPU, s", "over import jax, optax", "that over itself")
LONGEST_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description="The benchmark start_up.")
    parser.add_argument("--quick", action="store_true", help="few rounds: a look, not a verdict")
    rounds = 5 if parser.parse_args().quick else 21
    rows, bars = [], []
    for name, script in IMPORTS.items():
        row, ratio, spread = measure(name, ["-c", script], rounds)
        rows.append(row)
        if name == "import jaxfleet":
            bars.append(Bar(f"{name}, over {JAX}", ratio, 1.1, spread))
    with TemporaryDirectory() as folder:
        program = Path(folder, "step.txt")
        program.write_text(PROGRAM)
        for command in COMMANDS:
            arguments = ["-m", "jaxfleet", *command.format(program).split()]
            name = "jaxfleet " + command.format(program.name)
            row, ratio, spread = measure(name, arguments, rounds)
            rows.append(row)
            bars.append(Bar(f"{name}, over {JAX}", ratio, 1.0, spread))  # more would import JAX
    print_table(HEADS, rows)
    print_bars("start_up", bars)


def measure(
    name: str, arguments: Sequence[str], rounds: int
) -> tuple[tuple[str, ...], float, float]:
    """Returns a row of the table, the ratio, and the spread of the baseline against itself."""
    baseline = ["-c", JAX]
    cpu_seconds(arguments)  # writes what Python compiles, and fills the file cache
    took = [
        (cpu_seconds(baseline), cpu_seconds(arguments), cpu_seconds(baseline))
        for _ in range(rounds)
    ]
    ratio = statistics.median(ours / base for base, ours, _ in took)
    itself = median_interval([again / base for base, _, again in took])
    median = statistics.median(ours for _, ours, _ in took)
    shown = (f"{median:.2f}", f"{ratio:.3f}", "{:.3f} to {:.3f}".format(*itself))
    return (name, *shown), ratio, max(abs(end - 1) for end in itself)


def cpu_seconds(arguments: Sequence[str]) -> float:
    """Runs Python on the arguments; returns the processor time of that process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, *arguments],
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=LONGEST_S,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
