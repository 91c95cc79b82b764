"""The machines of a job, as PaddleCloud names them."""

from dataclasses import dataclass

from jaxfleet.env.names import IP, PORT, TRAINER_ID, TRAINERS
from jaxfleet.env.reading import get, read_number, whole


@dataclass(frozen=True)
class CloudNodes:
    """Holds the machines of a job as PaddleCloud names them.

    Attributes:
        count: `PADDLE_TRAINERS_NUM`, 1 unless set.
        names: `PADDLE_TRAINERS`, None where it is not set.
        own: `POD_IP`, or None.
        rank: `PADDLE_TRAINER_ID`: of this machine, or None.
        port: `PADDLE_PORT`, or None where it is no number.
        ports: `TRAINER_PORTS_NUM`: how many ports from there on are free; 0 unless set.
    """

    count: int
    names: tuple[str, ...] | None
    own: str | None
    rank: int | None
    port: int | None
    ports: int


def read_cloud_nodes() -> CloudNodes:
    """Returns what PaddleCloud says of the machines of a job.

    Raises:
        StrategyError: a number is none.
    """
    names = tuple(word.strip() for word in get("PADDLE_TRAINERS").split(",") if word.strip())
    of_machines = "PaddleCloud sets it to a machine's number"
    return CloudNodes(
        count=read_number(TRAINERS, least=1) if get(TRAINERS) else 1,
        names=names or None,
        own=get(IP) or None,
        rank=read_number(TRAINER_ID, least=0, hint=of_machines) if get(TRAINER_ID) else None,
        port=whole(get(PORT)),
        ports=whole(get("TRAINER_PORTS_NUM")) or 0,
    )
