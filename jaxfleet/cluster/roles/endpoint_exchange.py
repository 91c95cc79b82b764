"""Exchange of endpoints: addresses and ports on which processes can be reached."""

import random
import socket
from collections.abc import Sequence

from jaxfleet.cluster.rendezvous import Rendezvous
from jaxfleet.errors import StrategyError

_FIRST_DRAWN, _LAST_DRAWN, _LAST = 60001, 64000, 65535
_ALONE = "127.0.0.1"


def local_ip() -> str:
    """Returns this machine's address, by a lookup of its host name."""
    name = socket.gethostname()
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        what = f"the address of this machine, {name}, cannot be found: {error}"
        raise StrategyError(what, hint="name it in /etc/hosts or in DNS") from error


def all_ips(meeting: Rendezvous) -> list[str]:
    """Returns the machine address of every process, by rank; a collective call."""
    try:
        mine = local_ip()
    except StrategyError:
        mine = ""
    return _reachable(meeting.gather("all", (socket.gethostname(), mine), "addresses"))


def all_endpoints(
    meeting: Rendezvous, ips: Sequence[str], ranks: Sequence[int], rank: int
) -> list[str]:
    """Returns one endpoint for each of some processes; a collective call, with equal arguments.

    The first port is the one that fluid draws for this number of servers; from there on, processes
    of one machine each take a different free port.
    """
    port = None
    if rank in ranks:
        here = [each for each in ranks if ips[each] == ips[rank]]
        port = _free_port(drawn_port(len(ranks)) + here.index(rank), len(here))
    ports = meeting.gather("all", port, "ports")
    return [f"{ips[each]}:{ports[each]}" for each in ranks]


def drawn_port(number: int) -> int:
    """Returns the port that fluid draws for a number of servers: the same on all machines."""
    return random.Random(number).randint(_FIRST_DRAWN, _LAST_DRAWN)  # noqa: S311  # hides nothing


def _reachable(said: Sequence[tuple[str, str]]) -> list[str]:
    if len({host for host, _ in said}) == 1:  # a single machine needs no name
        return [ip or _ALONE for _, ip in said]
    for host, ip in said:
        if not ip or ip.startswith("127."):
            found = f"is {ip}, which no other machine reaches" if ip else "cannot be found"
            what = f"the address of machine {host} {found}"
            raise StrategyError(what, hint="name every machine in DNS, or in /etc/hosts of all")
    return [ip for _, ip in said]


def _free_port(first: int, step: int) -> int:
    for port in range(first, _LAST + 1, step):
        with socket.socket() as held:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                held.bind(("", port))
            except OSError:
                continue
            return port
    raise StrategyError(f"no port of this machine from {first} on, by {step}, is free")
