"""Runs a saved program on saved values in a process without any other information.

Arguments: the program, the values (as .npz), the file for the results, and a module that registers
the operators, if jaxfleet does not.
"""

import importlib
import sys
from pathlib import Path

import jax
import numpy as np

from jaxfleet.ir import Kind, Program
from jaxfleet.ir.serialization import load_program
from jaxfleet.ops import Array, Interpreter

LETTERS = {"b": 8}


def run(program: Program, values: dict[str, Array]) -> dict[str, Array]:
    """Returns the state and the fetches after one step."""
    returned = [v.name for v in program.of_kind(Kind.PARAM, Kind.STATE)]
    returned += [name for op in program.root.ops if op.type == "fetch" for name in op.reads]

    def step(values: dict[str, Array]) -> dict[str, Array]:
        after = Interpreter(program, LETTERS).run(values)
        return {name: after[name] for name in returned}

    return {name: np.asarray(value) for name, value in jax.jit(step)(values).items()}


def main() -> None:
    """Runs the program of the command line."""
    path, values, results, *modules = sys.argv[1:]
    for module in modules:
        importlib.import_module(module)
    with np.load(values) as archive:
        outcome = run(load_program(path), dict(archive))
    np.savez(results, **outcome)
    loaded = sorted(name for name in sys.modules if not name.startswith("_"))
    Path(f"{results}.modules").write_text("\n".join(loaded))


if __name__ == "__main__":
    main()
