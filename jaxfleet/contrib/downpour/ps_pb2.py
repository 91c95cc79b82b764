"""The messages of a Downpour job under pslib's names; each call creates an empty message."""

from collections.abc import Callable
from dataclasses import is_dataclass
from functools import partial

from jaxfleet.contrib.downpour import descriptions
from jaxfleet.contrib.downpour.messages import Message

PS_SPARSE_TABLE = descriptions.SPARSE
PS_DENSE_TABLE = descriptions.DENSE


_ALIKE = {"SparseAdagradSGDRuleParameter": "SparseSGDRuleParameter"}  # the same fields


def __getattr__(name: str) -> Callable[[], Message]:
    name = _ALIKE.get(name, name)
    kind = getattr(descriptions, name, None)
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise AttributeError(name)
    return partial(Message, kind)
