"""Servers with tables only die one after the other, and end with the same rows, bit for bit."""

from functools import partial
from pathlib import Path

import numpy as np

from jaxfleet.errors import PeerLostError, ProgramError
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.remote_tables import RemoteTables
from jaxfleet.ps.client.trainer_identity import TrainerIdentity
from jaxfleet.ps.timeouts import Timeouts
from jaxfleet.transport.messages import Kind
from tests.faults import table_training
from tests.faults.cluster import LOST_S, check_same
from tests.faults.memory_jobs import NAME, End, MemoryJob
from tests.ps.server.table_programs import table_program

STEPS = 14
PAUSE_S = 0.15
REPLAY_BYTES = 20_000


class TableJob(MemoryJob):
    """A job of tables without a step: pushed gradients depend on looked-up rows.

    Attributes:
        nan_at: the step at which trainer 1 pushes a value that is not finite.
    """

    nan_at = -1

    def train(self, trainer: int) -> End:
        specs, servers = table_training.SPECS, len(self.endpoints)
        made = (
            table_program(specs, server=n, servers=servers, trainers=self.trainers)
            for n in range(servers)
        )
        texts = [(str(program), dict[str, np.ndarray]()) for program in made]
        me = TrainerIdentity(NAME, trainer, self.trainers, self.endpoints, "hash", texts)
        timeouts = Timeouts(
            lost_after_s=LOST_S,
            step_timeout_s=self.step_s,
            server_return_s=self.returns_s,
            connect_s=30.0,
        )
        client = self.client(me, timeouts, REPLAY_BYTES)
        try:
            last = self._trained(client)
        except BaseException:
            client.abandon()
            raise
        client.close()
        return End(None, last)

    def _trained(self, client: Client) -> dict[str, np.ndarray]:
        client.open()
        if client.me.trainer == 0:
            body = {"replace": False}
            servers = range(len(self.endpoints))
            client.wait([client.request(s, Kind.ASSIGN, body=body) for s in servers])
        tables = RemoteTables(client, table_training.SPECS)
        for step in range(1, STEPS + 1):
            self._step(client, tables, step)
        keys = {spec.name: table_training.ALL_KEYS for spec in table_training.SPECS}
        return dict(tables.look_up_all(keys))

    def _step(self, client: Client, tables: RemoteTables, step: int) -> None:
        trainer = client.me.trainer
        client.next_step(8)
        client.doing(f"step {step}")
        keys = table_training.keys_of(trainer, step)
        found = tables.look_up_all({spec.name: keys for spec in table_training.SPECS})
        for name, rows in found.items():
            grads = table_training.grads_of(trainer, step, rows)
            if step == self.nan_at and trainer == 1:
                grads[:] = np.nan
            tables.push(name, keys, grads)
        if client.replay.is_full:
            servers = range(len(self.endpoints))
            client.wait([client.request(server, Kind.SAVE, body={}) for server in servers])
            for server in servers:
                client.replay.forget_saved(server, step)
        self.finished(trainer, step, PAUSE_S)


def test_servers_that_are_killed_change_no_bit_of_any_row(tmp_path: Path) -> None:
    # The first dies with only its first checkpoint; the second has several steps to catch up;
    # then the first again, after forced incremental checkpoints.
    job = TableJob(tmp_path, returns_s=30.0, step_s=30.0)
    kills = [(0, 1), (1, 5), (0, 9)]
    job.run({(0, step): partial(job.kill_server, server, away_s=1.0) for server, step in kills})
    assert job.starts == [3, 2]
    check_same(job.results(), table_training.expected(STEPS, 2))
    saved = {path.name for path in (tmp_path / "server0").glob("step-*")}
    assert len(saved) > 2  # increments, and their base


def test_a_gradient_that_is_not_finite_ends_the_job_by_its_name() -> None:
    job = TableJob()
    job.nan_at = 3
    job.run()
    failed = job.error("trainer 1", ProgramError)
    assert "push rows of step 3, table" in failed
    assert "are not finite" in failed
    left = job.error("trainer 0", PeerLostError)
    assert "trainer 1 is lost" in left
    assert "rows of 'users'" in left
