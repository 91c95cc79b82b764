"""A parameter server: a state machine, what it holds, and the loop that runs it."""

from jaxfleet.ps.server.core import ServerCore as ServerCore
from jaxfleet.ps.server.loop import Server as Server
from jaxfleet.ps.server.options import ServerOptions as ServerOptions
