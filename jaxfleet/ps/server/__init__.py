"""The parameter server: a state machine, its state, and the event loop that runs it."""

from jaxfleet.ps.server.event_loop import Server as Server
from jaxfleet.ps.server.options import ServerOptions as ServerOptions
from jaxfleet.ps.server.state_machine import ServerCore as ServerCore
