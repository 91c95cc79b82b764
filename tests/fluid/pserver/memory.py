"""Jobs of fluid's programs in one process, over a network in memory."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxfleet.fluid.pserver.connections import (
    Connections,
    JobInfo,
    server_options,
    trainer_identity,
)
from jaxfleet.lower import ExecutableCache
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.server import Server, ServerCore
from jaxfleet.ps.timeouts import Timeouts
from jaxfleet.transport.memory_network import MemoryNetwork

CACHE = ExecutableCache()
PATIENCE = Timeouts(lost_after_s=1e9, step_timeout_s=30.0, connect_s=30.0)


class MemoryWires:
    """Wires between threads that take turns."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.network = network

    def serve(self, facts: JobInfo, begin: Callable[[ServerCore], None]) -> None:
        """Serves until all trainers have closed."""
        options = server_options(facts, PATIENCE, job="test")
        core = ServerCore(facts.endpoint, CACHE, self.network.clock, options)
        begin(core)
        server = Server(
            core,
            self.network.listen(facts.endpoint),
            connect=self.network.connect,
            clock=self.network.clock,
            threaded=False,
        )
        server.serve()
        if core.failure is not None:
            raise core.failure

    def connect(self, facts: JobInfo) -> Client:
        lines, me = self.network.connect(facts.endpoints), trainer_identity(facts, job="test")
        return Client(lines, me, timeouts=PATIENCE, clock=self.network.clock)


class Job:
    """Runs processes over one network; each has its own connections."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()

    def connections(self) -> Connections:
        return Connections(MemoryWires(self.network), CACHE)

    def run(self, people: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        """Runs them to their ends; returns their results."""
        return self.network.run(people, longest_s=110.0)
