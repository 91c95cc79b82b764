"""Jobs of fluid's programs in one process, over a network in memory."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxfleet.fluid.pserver.connections import Connections, member, server_options
from jaxfleet.fluid.pserver.facts import Facts
from jaxfleet.lower import ExecutableCache
from jaxfleet.ps.client import Client
from jaxfleet.ps.memory_network import MemoryNetwork
from jaxfleet.ps.options import Patience
from jaxfleet.ps.server import Server, ServerCore

CACHE = ExecutableCache()
PATIENCE = Patience(lost_after_s=1e9, step_timeout_s=30.0, connect_s=30.0)


class MemoryWires:
    """Wires between threads that take turns."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.network = network

    def serve(self, facts: Facts, begin: Callable[[ServerCore], None]) -> None:
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

    def connect(self, facts: Facts) -> Client:
        """Returns a trainer's lines to its servers."""
        lines, me = self.network.connect(facts.endpoints), member(facts, job="test")
        return Client(lines, me, patience=PATIENCE, clock=self.network.clock)


class Job:
    """Runs people over one network; each has connections of its own."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()

    def connections(self) -> Connections:
        """Returns the connections of one process."""
        return Connections(MemoryWires(self.network), CACHE)

    def run(self, people: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        """Runs them to their ends; returns what they return."""
        return self.network.run(people, longest_s=110.0)
