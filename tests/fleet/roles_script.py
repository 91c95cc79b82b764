"""Asks a role maker everything and prints it as a line of JSON: one process of a job.

Usage: roles_script.py general FOLDER
"""

import json
import sys
from typing import Any

import numpy as np

from jaxfleet.fleet import roles


def made(kind: str, arguments: list[str]) -> Any:
    """Returns the role maker of a kind."""
    if kind == "general":
        return roles.GeneralRoleMaker(path=arguments[0], init_timeout_seconds=90,
                                           run_timeout_seconds=60)  # fmt: skip
    raise SystemExit(f"{kind}: no such role maker")


def asked(role: Any) -> dict[str, Any]:
    """Returns every answer of a role maker."""
    role.generate_role()
    worker = role.is_worker()
    rank = role._get_rank()  # noqa: SLF001  # fluid's name
    total, largest = np.zeros(2), [0]
    role.all_reduce_worker(np.array([rank, 0.5]), total)
    role.all_reduce_worker([rank], largest, mode="max")
    role.barrier_worker()
    role.barrier_all()
    role._barrier_server()  # noqa: SLF001
    return {
        "worker": worker,
        "server": role.is_server(),
        "first": role.is_first_worker(),
        "workers": role.worker_num(),
        "servers": role.server_num(),
        "index": role.worker_index() if worker else role.server_index(),
        "rank": rank,
        "size": role._get_size(),  # noqa: SLF001
        "trainers": role.get_trainer_endpoints(),
        "pservers": role.get_pserver_endpoints(),
        "gathered": role.all_gather(rank),
        "worker_gathered": role._worker_gather(rank),  # noqa: SLF001
        "sum": total.tolist(),
        "max": largest,
        "text": role.to_string(),
    }


if __name__ == "__main__":
    maker = made(sys.argv[1], sys.argv[2:])
    sys.stdout.write(f"ANSWERS {json.dumps(asked(maker))}\n")
    sys.stdout.flush()
    maker._finalize()  # noqa: SLF001
