"""Servers' programs with tables, and their rows computed by numpy."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxfleet.ir import Attr, Attrs, Block, Operator, Program
from jaxfleet.tables import Sgd, TableSpec, TableStore
from jaxfleet.tables.buckets import server_of
from jaxfleet.transport.messages import Kind
from tests.ps.server.common import Bench

USERS = TableSpec(name="users", dim=3, optimizer=Sgd(0.5))
ITEMS = TableSpec(name="items", dim=2, optimizer=Sgd(0.25))
KEYS = np.array([-(2**63), -7, 0, 1, 2**40 + 7, 2**63 - 1], np.int64)


def table_program(
    tables: Iterable[TableSpec] = (USERS,), *, server: int = 0, servers: int = 1, trainers: int = 2
) -> Program:
    endpoints = tuple(f"127.0.0.1:{7001 + number}" for number in range(servers))
    attrs: dict[str, Attr] = {
        "endpoint": endpoints[server],
        "endpoints": endpoints,
        "pserver_id": server,
        "role": "pserver",
        "tables": tuple(table.to_text() for table in tables),
        "trainers": trainers,
    }
    facts: dict[str, Attr] = {"combine_block_id": -1, "lr_decay_block_id": -1}
    facts |= {"optimize_blocks": (), "part_block_ids": ()}
    serve = Operator("listen_and_serv", attrs=Attrs(facts))
    return Program(f"p.pserver{server}", {}, (Block(ops=(serve,)),), Attrs(attrs))


def initial(spec: TableSpec, keys: np.ndarray) -> np.ndarray:
    return TableStore(spec).look_up(keys)


def drawn_rows(seed: Sequence[int], count: int, dim: int) -> np.ndarray:
    return np.random.default_rng(list(seed)).standard_normal((count, dim)).astype(np.float32)


def own_keys(keys: np.ndarray, server: int, servers: int) -> np.ndarray:
    return keys[server_of(keys, servers) == server]


@dataclass
class Rows:
    """A server of one trainer, and its keys.

    Attributes:
        bench: the server.
        keys: the keys on this server.
    """

    bench: Bench
    keys: np.ndarray

    def push(self, step: int, tables: Iterable[TableSpec], some: slice = slice(None)) -> None:
        """Pushes gradients drawn by step and key, so independent of the number of servers."""
        keys = self.keys[some]
        for table in tables:
            drawn = [drawn_rows((step, int(key) % 2**31), 1, table.dim) for key in keys]
            grads = np.concatenate([np.empty((0, table.dim), np.float32), *drawn])
            body, arrays = {"table": table.name}, {"keys": keys, "grads": grads}
            assert not self.bench.send(0, Kind.PUSH_ROWS, step, dict(body), arrays)

    def seen(self, step: int, table: TableSpec, keys: np.ndarray | None = None) -> np.ndarray:
        """Returns rows as a step sees them."""
        wanted = self.keys if keys is None else keys
        reply = self.bench.one(0, Kind.LOOK_UP, step, {"table": table.name}, {"keys": wanted})
        assert reply.kind is Kind.ROWS, reply
        return reply.tensors[0].array
