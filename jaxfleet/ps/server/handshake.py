"""Handshake with trainers, whose first hello gives a server its job and its number."""

from collections.abc import Callable
from dataclasses import dataclass, field

from jaxfleet.observability.notices import alert
from jaxfleet.ps.server.options import ServerIdentity
from jaxfleet.ps.server.outbox import Outbox, RequestError
from jaxfleet.ps.server.request_router import RequestRouter
from jaxfleet.ps.server.trainer_registry import TrainerRegistry
from jaxfleet.transport.messages import Kind, Message, Peer, Plain

_LONGEST = 300  # characters of an endpoint; a host's name has at most 253
_MOST_DAMAGE = 1000  # characters
_ALIKE = (
    "start all trainers and servers with the same job, script and strategy; servers serve one step"
)
_RUN_SCRIPT = "start it by `jaxfleet launch --servers-run-script ...`, or run the script as PSERVER"


@dataclass
class Handshake:
    """Handles hellos.

    Attributes:
        endpoint: the server's endpoint, as trainers name it.
        outbox: receives replies; the handshake sets its server name.
        me: the server's identity; the handshake sets its job.
        on_strangers: called when earlier trainers are discarded as strangers.
        on_new_process: called with a trainer that connects as a new process.
    """

    endpoint: str
    outbox: Outbox
    trainers: TrainerRegistry
    router: RequestRouter
    me: ServerIdentity
    server: int | None
    on_strangers: Callable[[], None] = lambda: None
    on_new_process: Callable[[int], None] = lambda _: None
    _damage: list[str] = field(default_factory=list)
    _versions: set[str] = field(default_factory=set)  # differing versions already logged

    def __post_init__(self) -> None:
        if self.server is not None:
            self.outbox.name = f"server {self.server}"

    @property
    def servers(self) -> list[str]:
        """The endpoints of all servers, once a trainer has sent them."""
        servers = self.trainers.facts.get("servers", [])
        assert isinstance(servers, list)
        return [str(server) for server in servers]

    def hello(self, peer: Peer, message: Message, now: float) -> None:
        """Admits a trainer.

        Raises:
            RequestError: it is of another job, its number is taken, or it sends no programs and
                this server has none.
        """
        if not self.router.defined and self.trainers.none_lives(now):
            # They left before there was a program, so they own no state.
            self.trainers.forget()
            self.on_strangers()
        if message.body.get("defines") is False and not self.router.defined:
            what = f"{message.sender} runs a script whose servers run it too, and this server was"
            raise RequestError("refused", f"{what} started without it", hint=_RUN_SCRIPT)
        before = dict(self.trainers.by_id)
        refusal = self._misplaced(message) or self.trainers.hello(peer, message, now)
        if refusal is not None:
            raise RequestError("refused", refusal, hint=_ALIKE)
        self.trainers.options = self.trainers.options.after_hello(message.body)
        if self.server is None:
            self.server = self.servers.index(self.endpoint)
        self.outbox.name = f"server {self.server}"
        self.me.job = str(self.trainers.facts.get("job"))
        self.me.program = str(self.trainers.facts.get("program"))
        self.me.text = self.trainers.text
        self._warn_of_versions(message)
        number = message.body["trainer"]
        assert isinstance(number, int)
        if (old := before.get(number)) is not None and old.session != message.body.get("session"):
            self.on_new_process(number)
        body: dict[str, Plain] = {
            "server": self.server,
            "incarnation": self.me.incarnation,
            "step": self.router.step_of(number),
            "defined": self.router.defined,
        }
        if self._damage:
            body["damage"] = "; ".join(self._damage)[:_MOST_DAMAGE]
        self.outbox.answer(peer, message, Kind.WELCOME, body)

    def note_damage(self, text: str) -> None:
        """Records an unreadable recovery checkpoint, for trainers that miss its content."""
        self._damage.append(text)
        alert(text)

    def _warn_of_versions(self, message: Message) -> None:
        """Logs trainers with differing versions, which may round differently."""
        theirs, first = message.body.get("versions"), self.trainers.versions
        if theirs != first and str(theirs) not in self._versions:
            self._versions.add(str(theirs))
            what = f"{message.sender} runs {str(theirs)[:_LONGEST]}"
            alert(f"{what}, and trainer {self.trainers.first} {first}")

    def _misplaced(self, message: Message) -> str | None:
        """Returns the reason that this server is not among those of a hello, if so."""
        servers = message.body.get("servers")
        if not isinstance(servers, list):
            return None
        if not all(isinstance(name, str) and len(name) <= _LONGEST for name in servers):
            return "servers are a list of endpoints, such as 127.0.0.1:6174"
        if self.server is None and self.endpoint not in servers:
            return f"{message.sender} names the servers {servers}, and this one is {self.endpoint}"
        if self.server is not None and self.server >= len(servers):
            return f"{message.sender} names {len(servers)} servers, and this is {self.server}"
        return None
