"""Queries a role maker and prints the answers as a line of JSON: one process of a job.

Usage: roles_script.py general FOLDER | symmetric | collective | absent | failing
"""

import json
import os
import sys
import time
from typing import Any

import numpy as np

from jaxfleet.cluster import roles
from jaxfleet.errors import PeerLostError


def made(kind: str, arguments: list[str]) -> Any:
    if kind == "general":
        return roles.GeneralRoleMaker(path=arguments[0], init_timeout_seconds=90,
                                           run_timeout_seconds=60)  # fmt: skip
    if kind == "symmetric":
        return roles.MPISymetricRoleMaker(timeout_seconds=120)
    return roles.MPICollectiveRoleMaker(timeout_seconds=120)


def asked(role: Any) -> dict[str, Any]:
    """Returns every answer of a role maker."""
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


def asked_early(role: Any) -> str:
    """Returns the answers of a role maker before its role is generated."""
    try:
        return f"{role.is_worker()}"
    except NameError as error:
        return str(error)


def wait_for_the_last(role: Any) -> None:
    """Waits for all, while the last process does not arrive."""
    role._world._timeout_s = 10.0  # noqa: SLF001  # all have just met
    if role.worker_index() == role.worker_num() - 1:
        time.sleep(300)
    try:
        role.barrier_all()
    except PeerLostError as error:
        # In one write: mpirun interleaves outputs of ranks, and a traceback takes many writes.
        os.write(2, f"PeerLostError: {error}\n".encode())
        raise


def main(kind: str, *arguments: str) -> None:
    role = made(kind, list(arguments))
    early = asked_early(role)
    role.generate_role()
    role.generate_role()
    answers = asked(role) | {"early": early}
    sys.stdout.write(f"ANSWERS {json.dumps(answers)}\n")
    sys.stdout.flush()
    role.barrier_all()
    if kind == "failing" and role.worker_index() == 1:
        raise SystemError("of the script")
    if kind == "failing":
        role.barrier_all()
    if kind == "absent":
        wait_for_the_last(role)
    role._finalize()  # noqa: SLF001


if __name__ == "__main__":
    main(*sys.argv[1:])
