"""Reader of the facts recorded from fluid 1.8.5 (`conformance/`)."""

import functools
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("conformance")
Case = dict[str, Any]


@functools.cache
def cases(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text())


def programs() -> dict[tuple[str, str], Case]:
    """Returns a recorded case for every net and optimizer."""
    found: dict[tuple[str, str], Case] = {}
    for case in cases("transpile_cases"):
        found.setdefault((case["net"], case["optimizer"]), case)
    return found


def local(ops: list[Case]) -> list[Case]:
    """Returns a collective program's operators without those added by a rewrite."""
    added = ("c_sync_calc_stream", "c_allreduce_sum", "c_sync_comm_stream", "c_broadcast")
    kept = [op for op in ops if op["type"] not in added]
    return [op for op in kept if not (op["type"] == "scale" and op["in"] == op["out"])]
