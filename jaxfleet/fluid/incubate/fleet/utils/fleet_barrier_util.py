"""A barrier of trainers by files in a shared folder."""

from functools import partial
from pathlib import Path

from jaxfleet.cluster.rendezvous.protocol import Poll
from jaxfleet.errors import ConnectError
from jaxfleet.fluid.incubate.fleet.base.fleet_base import Fleet
from jaxfleet.fluid.incubate.fleet.parameter_server import distribute_transpiler

_TIMEOUT_S = 3600.0


def check_all_trainers_ready(
    ready_path: str, epoch: int, *, fleet: Fleet | None = None, timeout_s: float = _TIMEOUT_S
) -> None:
    """Waits until every trainer of a job has reached an epoch, `timeout_s` for all together.

    In the folder `ready_path` each trainer writes `ready.<epoch>.<trainer>.done`. `fleet` is that
    of the transpiler unless given. Raises ConnectError if a trainer did not arrive in time.
    """
    job = distribute_transpiler.fleet if fleet is None else fleet
    folder, count = Path(ready_path), job.worker_num()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"ready.{epoch}.{job.worker_index()}.done").touch()
    poll = Poll(timeout_s)
    while True:
        there = {path.name for path in folder.iterdir()}
        missing = [at for at in range(count) if f"ready.{epoch}.{at}.done" not in there]
        if not missing:
            return
        if poll.is_over:
            what = f"waited {timeout_s:g} s in {folder} for trainers {missing} at epoch {epoch}"
            raise ConnectError(what, hint="all trainers see the same folder")
        poll.pause(partial("trainer {} waits for trainers {}".format, job.worker_index(), missing))
