"""Where trainers come in: they say of which job the server is, and which of its servers."""

from collections.abc import Callable
from dataclasses import dataclass, field

from jaxfleet.ps.messages import Kind, Message, Plain
from jaxfleet.ps.network import Peer
from jaxfleet.ps.server.desk import Desk, RefusedError
from jaxfleet.ps.server.holder import Holder
from jaxfleet.ps.server.identity import Identity
from jaxfleet.ps.server.peers import Trainers
from jaxfleet.watch.notices import alert

_LONGEST = 300  # characters of an endpoint; a host's name has at most 253
_MOST_DAMAGE = 1000  # characters
_ALIKE = (
    "start all trainers and servers with the same job, script and strategy; servers serve one step"
)
_RUN_SCRIPT = "start it by `jaxfleet launch --servers-run-script ...`, or run the script as PSERVER"


@dataclass
class Entrance:
    """Takes hellos.

    Attributes:
        endpoint: where the server listens, as trainers call it.
        desk: where answers go; it is told the server's name.
        trainers: those that came.
        holder: what the server has.
        me: who it is; it is told of which job.
        server: its number among the servers, once that is known.
        on_strangers: is called where those who came before were strangers.
        on_new_process: is given a trainer that comes as another process than before.
    """

    endpoint: str
    desk: Desk
    trainers: Trainers
    holder: Holder
    me: Identity
    server: int | None
    on_strangers: Callable[[], None] = lambda: None
    on_new_process: Callable[[int], None] = lambda _: None
    _damage: list[str] = field(default_factory=list)
    _versions: set[str] = field(default_factory=set)  # that were logged to differ

    def __post_init__(self) -> None:
        if self.server is not None:
            self.desk.name = f"server {self.server}"

    @property
    def servers(self) -> list[str]:
        """The endpoints of all servers, once a trainer named them."""
        servers = self.trainers.facts.get("servers", [])
        assert isinstance(servers, list)
        return [str(server) for server in servers]

    def hello(self, peer: Peer, message: Message, now: float) -> None:
        """Takes a trainer in.

        Raises:
            RefusedError: it is of another job, there is such a trainer already, or it gives servers
                no programs and this one has none.
        """
        if not self.holder.defined and self.trainers.none_lives(now):
            # They came, and went before there was a program: nothing is theirs.
            self.trainers.forget()
            self.on_strangers()
        if message.body.get("defines") is False and not self.holder.defined:
            what = f"{message.sender} runs a script whose servers run it too, and this server was"
            raise RefusedError("refused", f"{what} started without it", hint=_RUN_SCRIPT)
        before = dict(self.trainers.by_id)
        refusal = self._misplaced(message) or self.trainers.hello(peer, message, now)
        if refusal is not None:
            raise RefusedError("refused", refusal, hint=_ALIKE)
        self.trainers.options = self.trainers.options.after_hello(message.body)
        if self.server is None:
            self.server = self.servers.index(self.endpoint)
        self.desk.name = f"server {self.server}"
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
            "step": self.holder.step_of(number),
            "defined": self.holder.defined,
        }
        if self._damage:
            body["damage"] = "; ".join(self._damage)[:_MOST_DAMAGE]
        self.desk.answer(peer, message, Kind.WELCOME, body)

    def note_damage(self, text: str) -> None:
        """Notes an own checkpoint that cannot be read, for trainers that miss what it held."""
        self._damage.append(text)
        alert(text)

    def _warn_of_versions(self, message: Message) -> None:
        """Logs where trainers of other versions work together, which may round differently."""
        theirs, first = message.body.get("versions"), self.trainers.versions
        if theirs != first and str(theirs) not in self._versions:
            self._versions.add(str(theirs))
            what = f"{message.sender} runs {str(theirs)[:_LONGEST]}"
            alert(f"{what}, and trainer {self.trainers.first} {first}")

    def _misplaced(self, message: Message) -> str | None:
        """Says why this server is none of those that a hello names, if it is not."""
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
