"""Messages between trainers and servers: a small header and raw arrays, and nothing that runs.

Every message has a kind, who sent it, and a step. What a kind holds besides is listed in
docs/parameter-servers.md. Numbers of steps start at 1; step 0 is the state before the first.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"

PROTOCOL = 2


class Kind(enum.Enum):
    """What a message is for."""

    HELLO = "hello"
    WELCOME = "welcome"
    DEFINE = "define"
    ASSIGN = "assign"
    PUSH = "push"
    PULL = "pull"
    VALUES = "values"
    LOOK_UP = "look_up"
    ROWS = "rows"
    PUSH_ROWS = "push_rows"
    REDUCE = "reduce"
    REDUCED = "reduced"
    BARRIER = "barrier"
    PENDING = "pending"
    PARTS = "parts"
    SAVE = "save"
    LOAD = "load"
    SHRINK = "shrink"
    EXPORT = "export"
    STATS = "stats"
    HEARTBEAT = "heartbeat"
    BYE = "bye"
    OK = "ok"
    ERROR = "error"


@dataclass(frozen=True)
class Tensor:
    """A named array on its way.

    Attributes:
        name: the variable's.
        array: any shape, in C order; its dtype is one that a header can name.
    """

    name: str
    array: np.ndarray


@dataclass(frozen=True)
class Message:
    """One message.

    Attributes:
        kind: what it is for.
        sender: `trainer 0`, `server 1`.
        step: the step that it belongs to.
        number: a request's number among its sender's to this receiver; an answer has that of its
            request. A request that is sent again keeps its number.
        body: plain data, as msgpack holds it.
        tensors: arrays, in order.
    """

    kind: Kind
    sender: str
    step: int = 0
    number: int = 0
    body: Mapping[str, Plain] = field(default_factory=dict)
    tensors: tuple[Tensor, ...] = ()
