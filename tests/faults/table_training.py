"""A small training script with tables only, for trainers and for the reference in one process.

Pushed gradients depend on looked-up rows, so any error shows at the end.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxfleet.env import PserverRole, read_cluster
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.heartbeat import Heartbeat
from jaxfleet.ps.client.remote_tables import RemoteTables
from jaxfleet.ps.client.trainer_identity import TrainerIdentity
from jaxfleet.ps.server.process import job_network
from jaxfleet.ps.timeouts import Timeouts
from jaxfleet.tables import Adagrad, TableSpec, TableStore
from jaxfleet.tables.merge_pushes import merge
from jaxfleet.transport.messages import Kind
from tests.ps.server.table_programs import table_program

SPECS = (
    TableSpec(name="users", dim=3, optimizer=Adagrad(0.1)),
    TableSpec(name="items", dim=8, optimizer=Adagrad(0.1), memory_rows=30),  # the rest on disk
)
ALL_KEYS = np.arange(-60, 60) * (2**56 + 11)


class Looks(Protocol):
    """A source of rows that takes gradients."""

    def look_up(self, table: str, keys: np.ndarray) -> np.ndarray: ...


def keys_of(trainer: int, step: int) -> np.ndarray:
    """Returns the keys of a trainer's rows; none at some steps."""
    draw = np.random.default_rng([trainer, step])
    count = 0 if (trainer + step) % 5 == 0 else 60
    return draw.choice(ALL_KEYS, count, replace=False)


def grads_of(trainer: int, step: int, rows: np.ndarray) -> np.ndarray:
    draw = np.random.default_rng([trainer, step, 1]).standard_normal(rows.shape)
    return (np.float32(0.1) * rows + draw).astype(np.float32)


def expected(steps: int, trainers: int) -> dict[str, np.ndarray]:
    """Returns the rows after `steps` steps, from one store in this process."""
    found = {}
    for spec in SPECS:
        store = TableStore(spec)
        for step in range(1, steps + 1):
            keys = [keys_of(trainer, step) for trainer in range(trainers)]
            rows = [store.look_up(one, step=step) for one in keys]
            grads = [grads_of(trainer, step, one) for trainer, one in enumerate(rows)]
            store.update(*merge(list(zip(keys, grads, strict=True))), step=step)
        found[spec.name] = store.look_up(ALL_KEYS, step=steps + 1)
    return found


def connect(cluster: PserverRole, args: argparse.Namespace) -> Client:
    """Returns a trainer's client, once the servers have their programs and initial states."""
    assert cluster.trainer_id is not None
    servers, network = len(cluster.endpoints), job_network(cluster.secret_file)
    programs = [
        table_program(SPECS, server=n, servers=servers, trainers=cluster.trainers)
        for n in range(servers)
    ]
    texts = [(str(program), dict[str, np.ndarray]()) for program in programs]
    endpoints, number = cluster.endpoints, cluster.trainer_id
    me = TrainerIdentity(cluster.job, number, cluster.trainers, endpoints, "hash", texts)
    beats = Heartbeat(network, endpoints, sender=me.name, session=me.session, every_s=0.3)
    timeouts = Timeouts(
        lost_after_s=args.lost_after,
        step_timeout_s=args.step_timeout,
        server_return_s=cluster.server_return_s,
        connect_s=30.0,
    )
    lines = network.connect(endpoints)
    keeps = args.replay_bytes if cluster.server_return_s else 0
    client = Client(lines, me, timeouts=timeouts, heartbeat=beats, replay_bytes=keeps)
    client.open()
    if number == 0:
        body = {"replace": False}
        client.wait([client.request(s, Kind.ASSIGN, body=body) for s in range(servers)])
    return client


def steps(args: argparse.Namespace, client: Client) -> Iterator[int]:
    """Yields the numbers of the steps, and lets servers save when due."""
    for step in range(1, args.steps + 1):
        client.next_step(8)
        client.doing(f"step {step}")
        yield step
        print(f"step {step}.", flush=True)  # noqa: T201
        if client.replay.is_full:
            servers = range(len(client.me.endpoints))
            client.wait([client.request(server, Kind.SAVE, body={}) for server in servers])
            for server in servers:
                client.replay.forget_saved(server, step)
        time.sleep(args.pause)


def main() -> None:
    """Trains, and writes all rows to a file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--nan-at", type=int, default=-1)
    parser.add_argument("--lost-after", type=float, default=5.0)
    parser.add_argument("--step-timeout", type=float, default=6.0)
    parser.add_argument("--replay-bytes", type=int, default=1 << 20)
    args = parser.parse_args()
    cluster = read_cluster()
    assert cluster is not None
    client = connect(cluster, args)
    number, tables = client.me.trainer, RemoteTables(client, SPECS)
    for step in steps(args, client):
        keys = keys_of(number, step)
        found = tables.look_up_all({spec.name: keys for spec in SPECS})
        for name, rows in found.items():
            grads = grads_of(number, step, rows)
            if step == args.nan_at and number == 1:
                grads[:] = np.nan
            tables.push(name, keys, grads)
    last = tables.look_up_all({spec.name: ALL_KEYS for spec in SPECS})
    np.savez(args.out / f"result-{number}", allow_pickle=False, **last)
    client.close()


if __name__ == "__main__":
    main()
