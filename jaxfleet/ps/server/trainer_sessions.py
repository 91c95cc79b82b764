"""Sessions of trainers, from hello to bye.

The first hello gives a server its job and its number. Departures are recorded on disk, for a server
that is restarted when some trainers have ended.
"""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path

from jaxfleet.checkpoint.files import sync
from jaxfleet.observability.notices import alert
from jaxfleet.ps.server.collectives import CollectiveHandler
from jaxfleet.ps.server.options import ServerIdentity
from jaxfleet.ps.server.outbox import Outbox, Request, RequestError
from jaxfleet.ps.server.peer_state import Departures, PeerState
from jaxfleet.ps.server.request_router import RequestRouter
from jaxfleet.ps.server.trainer_registry import TrainerRegistry
from jaxfleet.transport.messages import Kind, Message, Peer, Plain

_LONGEST = 300  # characters of an endpoint; a host's name has at most 253
_MOST_DAMAGE = 1000  # characters
_ALIKE = (
    "start all trainers and servers with the same job, script and strategy; servers serve one step"
)
_RUN_SCRIPT = "start it by `jaxfleet launch --servers-run-script ...`, or run the script as PSERVER"


_FILE_NAME = "byes.json"
_VALID_S = 600.0  # without launch ids, a later start belongs to another run


@dataclass(frozen=True)
class DepartureRecord:
    """A file beside a server's recovery checkpoints; the id distinguishes launches of a job."""

    folder: Path
    launch_id: str | None = None

    def write(self, left: Departures) -> None:
        """Writes the record before the bye is answered; a failure is only logged."""
        fields = {"launch": self.launch_id, "trainers": left.trainers}
        text = json.dumps({**fields, "left": left.sessions, "present": left.present})
        new = self.folder / f"{_FILE_NAME}.new"  # a save removes `tmp-` files meanwhile
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            new.write_text(text)
            sync(new)
            new.replace(self.folder / _FILE_NAME)
            sync(self.folder)
        except OSError as error:
            alert(f"cannot note in {self.folder} which trainers have left: {error}")

    def read(self) -> Departures | None:
        """Returns the record if it is, or may be, of this launch; otherwise None."""
        path = self.folder / _FILE_NAME
        try:
            found = json.loads(path.read_text())
            launch_id = found["launch"]
            is_certain = launch_id == self.launch_id and launch_id is not None
            if not is_certain and None not in (launch_id, self.launch_id):
                return None
            if not is_certain and time.time() - path.stat().st_mtime > _VALID_S:
                return None
            left, present = (
                {int(trainer): session for trainer, session in found[name].items()}
                for name in ("left", "present")
            )
            return Departures(int(found["trainers"]), left, present, is_certain)
        except (OSError, ValueError, TypeError, AttributeError, KeyError):
            return None

    def clear(self) -> None:
        """Removes the record: the server has ended, or trainers of another run have connected."""
        try:
            (self.folder / _FILE_NAME).unlink(missing_ok=True)
        except OSError as error:
            alert(f"cannot remove {self.folder / _FILE_NAME}: {error}")


@dataclass
class TrainerSessions:
    """Sessions of trainers: handles hellos, which set the server's name and job, and byes.

    Attributes:
        endpoint: the server's endpoint, as trainers name it.
        record: where departures are recorded; None for a server that is never restarted.
        awaits_rerun: all trainers left before this server was restarted; it may serve another run.
    """

    endpoint: str
    outbox: Outbox
    trainers: TrainerRegistry
    router: RequestRouter
    collectives: CollectiveHandler
    me: ServerIdentity
    server: int | None
    record: DepartureRecord | None
    awaits_rerun: bool = False
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
            self.collectives.forget_strangers()
        if message.body.get("defines") is False and not self.router.defined:
            what = f"{message.sender} runs a script whose servers run it too, and this server was"
            raise RequestError("refused", f"{what} started without it", hint=_RUN_SCRIPT)
        before, gone = dict(self.trainers.by_id), self.trainers.gone
        refusal = self._misplaced(message) or self.trainers.hello(peer, message, now)
        if refusal is not None:
            raise RequestError("refused", refusal, hint=_ALIKE)
        self.trainers.options = self.trainers.options.after_hello(message.body)
        self.router.keep_past(keeps=self.trainers.may_return)
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
            self._let_in_again(number, old, now)
        known = self.trainers.by_id[number]
        body: dict[str, Plain] = {
            "server": self.server,
            "incarnation": self.me.incarnation,
            "step": self.router.step_of(number),
            "defined": self.router.defined and not self.router.awaits_program,
            "seen": known.seen,
            "pushed": known.pushed,
            "base": self.router.base,
            "restored": self.router.is_restored and self.trainers.is_under_way(number),
            "takes_pushes": self.router.takes_pushes,
            "rows": self.router.rows_of(number),
        }
        if self._damage:
            body["damage"] = "; ".join(self._damage)[:_MOST_DAMAGE]
        self.outbox.answer(peer, message, Kind.WELCOME, body)
        self.awaits_rerun = False
        if self.record is not None and gone is not None and self.trainers.gone is None:
            self.record.clear()
            for trainer in gone.sessions:
                self.router.wait_for(trainer)

    def _let_in_again(self, number: int, old: PeerState, now: float) -> None:
        """Continues with another process of a trainer, which has no request of the former one."""
        may_return = self.trainers.may_return
        self.collectives.forget_process(number, keeps_answers=may_return)
        for request in self.router.waiting():
            if request.trainer == number:
                self.router.drop(request)
        if not may_return:
            return
        for request in (*self.router.waiting(), *self.collectives.requests()):
            request.since = now  # the others wait from now on for a trainer that is alive
        self.router.go_on_with(number)
        silent_s = now - old.heard
        alert(
            f"{self.outbox.name}: trainer {number} has returned, {silent_s:.0f} s after its last "
            f"message, of step {old.step}"
        )

    def bye(self, request: Request) -> None:
        self.trainers.by_id[request.trainer].left = True
        if self.record is not None:
            self.record.write(self.trainers.departed())
        self.outbox.reply(request, Kind.OK)
        self.collectives.one_left()
        self._let_go(request.trainer)

    def _let_go(self, trainer: int) -> None:
        if self.trainers.options.may_leave or not self.router.waits:
            self.router.leave(trainer)

    def resume(self) -> None:
        """Reads which trainers left before this server was restarted: they do not return."""
        if self.record is None:
            return
        gone = self.trainers.gone = self.record.read()
        if gone is None:
            self.record.clear()
            return
        for trainer in self.trainers.left():
            self._let_go(trainer)
        if self.trainers.all_left() and gone.is_certain:
            alert(f"{self.outbox.name} was started again when all trainers had ended: it ends, too")
            self.outbox.tasks.clear()  # no trainer is left to compile for
        elif self.trainers.all_left():
            self.awaits_rerun = True
            alert(
                f"{self.outbox.name} was started again when all trainers had ended: it waits "
                f"{self.trainers.options.step_timeout_s:g} s for those of another run (where "
                "servers have a JAXFLEET_LAUNCH_ID, no server waits for them in the same launch)"
            )

    def end(self) -> None:
        """Clears the record once all have left: a restart begins another run."""
        if self.record is not None and self.trainers.all_left():
            self.record.clear()

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
