"""What values that wait on the host save of the device's memory, as it is counted.

Steps of `benchmarks/memory.py`, asked for less than can be: the least that is named, with and
without `strategy.offload`. Counted are the bytes between executables by the program, and XLA's
temporary bytes; no time, since on a CPU both memories are one.

    python benchmarks/offload.py
    python benchmarks/offload.py "mlp 24" --optimizer adam
"""

import argparse
import re
from typing import Any

from common import print_table
from memory import OPTIMIZERS, PROGRAMS, train_step

import jaxfleet as jf
from jaxfleet.errors import StrategyError

HEADS = ("MB", "as it is", "least without", "of it", "least with", "of it", "then on the host")


def least(stack: Any, tx: Any, **options: Any) -> Any:
    """Returns the report of a step with the smallest feasible budget."""
    tx = jf.distributed_optimizer(tx)
    example = ((stack.params, tx.init(stack.params)), stack.batch)
    budget = 1
    for _ in range(2):
        strategy = jf.DistributedStrategy(mode="single", memory_budget=budget, **options)
        try:
            step: Any = jf.distribute(train_step(stack, tx), example, strategy)
        except StrategyError as error:
            named = re.findall(r"made to take is ([\d,]+)", "".join(error.__notes__))
            budget = int(named[0].replace(",", ""))
        else:
            return step.memory_report()
    raise AssertionError(f"{budget} was named as the least, and cannot be met")


def main() -> None:
    """Prints a line for each program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", nargs="*", help=", ".join(PROGRAMS))
    parser.add_argument("--optimizer", choices=[*OPTIMIZERS], default="adam")
    args = parser.parse_args()
    rows = []
    for name in args.programs or PROGRAMS:
        stack, tx = PROGRAMS[name](), OPTIMIZERS[args.optimizer]()
        alone, moved = least(stack, tx, offload=False), least(stack, tx, offload=True)
        cells = [f"{alone.before_bytes / 1e6:.1f}"]
        for report in (alone, moved):
            cells.append(f"{report.after_bytes / 1e6:.1f}")
            cells.append(f"{report.after_bytes / report.before_bytes:.2f}")
        rows.append((f"{name}, {args.optimizer}", *cells, f"{moved.host_bytes / 1e6:.1f}"))
    print_table(HEADS, rows)


if __name__ == "__main__":
    main()
