"""Where processes can be reached, agreed on by all of them."""

import random
import socket
from collections.abc import Sequence

from jaxfleet.errors import StrategyError
from jaxfleet.fleet.meeting import Meeting

_FIRST_DRAWN, _LAST_DRAWN, _LAST = 60001, 64000, 65535
_ALONE = "127.0.0.1"


def local_ip() -> str:
    """Returns this machine's address, as its name is looked up.

    Raises:
        StrategyError: nothing knows the machine's name.
    """
    name = socket.gethostname()
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        what = f"the address of this machine, {name}, cannot be found: {error}"
        raise StrategyError(what, hint="name it in /etc/hosts or in DNS") from error


def all_ips(meeting: Meeting) -> list[str]:
    """Returns the address of every process's machine, by rank; all call it.

    Raises:
        StrategyError: there are several machines, and one has no address for the others.
    """
    try:
        mine = local_ip()
    except StrategyError:
        mine = ""
    return _reachable(meeting.gather("all", (socket.gethostname(), mine), "addresses"))


def all_endpoints(
    meeting: Meeting, ips: Sequence[str], ranks: Sequence[int], rank: int
) -> list[str]:
    """Returns an endpoint for each of some processes; all call it, with the same.

    The first port is the one that fluid draws for so many servers; from there on each takes one
    that is free and its own: the processes of a machine share the ports out.

    Args:
        meeting: of all.
        ips: the machines of all.
        ranks: who listens.
        rank: which of all this process is.

    Raises:
        StrategyError: no port is free.
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
    if len({host for host, _ in said}) == 1:  # then nobody need know how it is called
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
