"""Numbers and endpoints of the processes of a job."""

from jaxfleet.env.names import ENDPOINTS, TRAINER_ID, TRAINERS
from jaxfleet.env.reading import get, read_number, refuse, whole


def read_endpoints(name: str = ENDPOINTS) -> tuple[str, ...]:
    """Returns where the processes of a list are, in its order.

    Raises:
        StrategyError: it is not set, or one of them is no endpoint or stands there twice.
    """
    endpoints = tuple(word.strip() for word in get(name).split(","))
    if endpoints == ("",):
        hint = "list where the servers listen: 10.0.0.1:6174,10.0.0.2:6174"
        refuse(name, "is not set", hint)
    for at, endpoint in enumerate(endpoints):
        _check_endpoint(name, endpoint)
        if endpoint in endpoints[:at]:
            refuse(name, f"names {endpoint} twice", "every process has its own endpoint")
    return endpoints


def _check_endpoint(name: str, endpoint: str) -> None:
    host, colon, port = endpoint.rpartition(":")
    if not host or not colon or any(letter.isspace() for letter in host):
        refuse(name, f"has {endpoint!r}, which is no endpoint", "write 10.0.0.1:6174")
    if whole(port) is None or not 1 <= int(port) <= 65535:
        what = f"has {endpoint!r}, whose port is not one"
        refuse(name, what, "a port is a whole number from 1 to 65535")


def read_trainer_id(trainers: int, counted_by: str) -> int:
    """Returns the number of this trainer.

    Args:
        trainers: how many there are.
        counted_by: the variable that says so.

    Raises:
        StrategyError: it is not set, or there are not so many.
    """
    trainer = read_number(TRAINER_ID, least=0)
    if trainer >= trainers:
        said = trainers if counted_by == TRAINERS else f"a list of {trainers}"
        what = f"is {trainer}, but {counted_by} is {said}"
        refuse(TRAINER_ID, what, f"trainers are numbered from 0 to {trainers - 1}")
    return trainer
