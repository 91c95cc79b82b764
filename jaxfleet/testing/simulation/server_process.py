"""One process of a server: it serves, begins anew when its job has moved, and ends.

As `jaxfleet.ps.server.process.serve`, with the network, the disk and the worker of the simulation.
"""

import random
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from jaxfleet.errors import ClosedError
from jaxfleet.ps.server import Server, ServerCore, ServerOptions
from jaxfleet.ps.server.metrics import ServerMetrics
from jaxfleet.tables.buckets import server_of
from jaxfleet.testing.simulation import workload
from jaxfleet.testing.simulation.network import ProcessNetwork, SimulatedListener
from jaxfleet.testing.simulation.run import ServerEnd
from jaxfleet.testing.simulation.scheduler import Process, Scheduler
from jaxfleet.testing.simulation.task_queue import TaskQueue

KILLED = 128 + signal.SIGKILL  # a status, as of a shell


@dataclass(eq=False)
class ServerProcess:
    """A process of a server, also as the launch sees it.

    Attributes:
        servers: the number of servers when it was started.
        draw: returns a generator for a purpose.
        publish: called with metrics.
        status: 0 if it ended well; None while it runs.
    """

    process: Process
    number: int
    endpoint: str
    servers: int
    end: ServerEnd
    options: ServerOptions
    scheduler: Scheduler
    network: ProcessNetwork
    draw: Callable[[str], random.Random]
    publish: Callable[[ServerCore, ServerMetrics], None]
    status: int | None = None
    _server: Server | None = None
    _stopping: threading.Event = field(default_factory=threading.Event)

    @property
    def name(self) -> str:
        return self.process.name

    @property
    def ending(self) -> str:
        return "has ended" if self.status == 0 else f"ended with status {self.status}"

    def tell(self, number: int) -> None:
        """Ends the process as SIGTERM does."""
        assert number == signal.SIGTERM
        if self.status is None and self._server is not None:
            self.end.is_told = True
            self._server.stop()

    def serve(self) -> None:
        """Serves until the job is done, or has moved to servers without this one."""
        core: ServerCore | None = None
        listener: SimulatedListener | None = None
        end = self.end
        try:
            core = self._new_core()
            listener = self.network.listen(self.endpoint)
            self._serve(core, listener)
            while (members := core.next_members) is not None and not self._stopping.is_set():
                core = self._new_core()
                core.expect(members)
                self._serve(core, listener)
        except ClosedError as error:
            end.error = error if self.process.is_alive else None
        except Exception as error:  # noqa: BLE001  # the invariants judge it
            end.error = error
        if not self.process.is_alive:
            return
        end.is_up = False  # an ended server is not started again
        if listener is not None:
            listener.close()
        if core is not None:
            end.error = end.error or core.failure
            self._note_state(core)
        self.status = 0 if end.error is None else 1

    def _new_core(self) -> ServerCore:
        return ServerCore(self.endpoint, workload.cache(), self.scheduler.clock, self.options)

    def _serve(self, core: ServerCore, listener: SimulatedListener) -> None:
        what = f"worker {self.number} of start {self.end.starts}"
        self._server = Server(
            core,
            listener,
            connect=self.network.connect,
            clock=self.scheduler.clock,
            make_worker=partial(TaskQueue, self.scheduler, self.draw(what)),
            publish=partial(self.publish, core),
            stopping=self._stopping,
        )
        self._server.serve()
        self.end.has_served |= bool(core.servers)

    def _note_state(self, core: ServerCore) -> None:
        """Notes the values and rows with which the server has ended."""
        end, servers = self.end, len(core.servers) or self.servers
        end.values = {name.rpartition("/")[2]: np.array(x) for name, x in core.state.items()}
        end.data = _data(core, self.scheduler.now_s)
        for store in core.stores.values():
            keys = workload.KEYS[server_of(workload.KEYS, servers) == self.number]
            rows = store.look_up(keys)
            end.rows = {int(k): np.array(x) for k, x in zip(keys, rows, strict=True)}


def _data(core: ServerCore, now_s: float) -> dict[str, int]:
    """Returns the counts of the one epoch of leased samples; empty if there are none."""
    data = core.metrics(now_s).counted.get("data")
    epochs = data.get("epochs") if isinstance(data, dict) else None
    found = epochs[0] if isinstance(epochs, list) and epochs else None
    return {name: int(str(n)) for name, n in found.items()} if isinstance(found, dict) else {}
