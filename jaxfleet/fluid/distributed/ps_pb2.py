"""The messages of a Downpour job, under pslib's names: each call makes one with nothing in it."""

from collections.abc import Callable
from dataclasses import is_dataclass
from functools import partial

from jaxfleet.fluid.distributed import descriptions
from jaxfleet.fluid.distributed.messages import Message

PS_SPARSE_TABLE = descriptions.SPARSE
PS_DENSE_TABLE = descriptions.DENSE


def __getattr__(name: str) -> Callable[[], Message]:
    kind = getattr(descriptions, name, None)
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise AttributeError(name)
    return partial(Message, kind)
