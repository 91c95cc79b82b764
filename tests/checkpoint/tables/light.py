"""Runs a script of this folder without jax: `light.py breaker points folder`.

The script finds an empty `jaxfleet` whose parts can be imported, so a process starts quickly.
"""

import runpy
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[3]

if __name__ == "__main__":
    package = ModuleType("jaxfleet")
    package.__path__ = [str(ROOT / "jaxfleet")]
    sys.modules["jaxfleet"] = package
    sys.path.insert(0, str(ROOT))
    del sys.argv[0]
    runpy.run_module(f"tests.checkpoint.tables.{sys.argv[0]}", run_name="__main__")
