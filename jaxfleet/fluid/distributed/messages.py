"""Descriptions as scripts put them together: with the methods of protocol buffers.

::

    ps_param = PSParameter()
    ps_param.server_param.CopyFrom(server.get_desc())
    ps_param.trainer_param.skip_op.extend(["lookup_table"])
    text_format.Merge(text, ps_param)

A message has the fields of a description of `descriptions`, and changes; `description_of` makes the
description of it. A field that was not set reads as protocol buffers have it: a message with
nothing in it, an empty list, or 0. `SerializeToString` gives the text form as bytes, as nothing
here speaks pslib's wire format.
"""

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, get_type_hints

from jaxfleet.errors import FieldError
from jaxfleet.fluid.checks import check_type, mistake
from jaxfleet.fluid.distributed import descriptions
from jaxfleet.fluid.distributed.text import from_text, to_text, type_of_field


class Message:
    """A description that may be changed.

    Args:
        kind: the class of the description.
    """

    def __init__(self, kind: type[Any]) -> None:
        object.__setattr__(self, "_kind", kind)
        object.__setattr__(self, "_fields", {})
        object.__setattr__(self, "_described", None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known, wanted = self._fields, self._field(name)
        if name not in known and (wanted.is_repeated or wanted.is_message):
            known[name] = wanted.empty()
        return known.get(name, wanted.default)

    def __setattr__(self, name: str, value: Any) -> None:
        wanted = self._field(name)
        if wanted.is_repeated or wanted.is_message:
            what = f"'{name}' of {self._kind.__name__} cannot be assigned"
            raise mistake(what, f"{name}.CopyFrom(...), or {name}.extend([...])", FieldError)
        self._fields[name] = wanted.type(value)

    def _field(self, name: str) -> "_Field":
        found = _fields_of(self._kind).get(name)
        if found is None:
            what = f"{self._kind.__name__} has no field '{name}'"
            raise AttributeError(what)
        return found

    @classmethod
    def of(cls, description: Any) -> "Message":
        """Returns a message that says what a description says."""
        made = cls(type(description))
        made.MergeFrom(description)
        return made

    def CopyFrom(self, other: Any) -> None:  # noqa: N802  # protocol buffers' name
        """Becomes what another message, or a description, is.

        Raises:
            TypeError: it is of another kind.
        """
        given = description_of(other)
        check_type(given, "what CopyFrom is given", self._kind)
        self.Clear()
        self.MergeFrom(given)

    def MergeFrom(self, other: Any) -> None:  # noqa: N802
        """Takes the fields that another message has set; lists grow by theirs."""
        given = description_of(other)
        for one in fields(given):
            value = getattr(given, one.name)
            if isinstance(value, tuple):
                getattr(self, one.name).extend(value)
            elif is_dataclass(value):
                getattr(self, one.name).MergeFrom(value)
            elif value is not None:
                setattr(self, one.name, value)

    def Clear(self) -> None:  # noqa: N802
        """Sets no field."""
        self._fields.clear()

    def HasField(self, name: str) -> bool:  # noqa: N802
        """Whether a field that is not a list is set."""
        return getattr(description_of(self), name) is not None

    def SerializeToString(self) -> bytes:  # noqa: N802
        """Returns the text form as bytes."""
        return str(self).encode()

    def ParseFromString(self, data: bytes) -> None:  # noqa: N802
        """Becomes what `SerializeToString` wrote.

        Raises:
            TextError: it is not such a text.
        """
        self.CopyFrom(from_text(data.decode(), self._kind, "the message"))

    def __str__(self) -> str:
        return to_text(description_of(self))

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Message):
            return NotImplemented
        return self._kind is other._kind and str(self) == str(other)

    __hash__ = object.__hash__

    @property
    def tables(self) -> tuple[descriptions.TableParameter, ...]:
        """The tables of the servers, of a whole job's message."""
        found: tuple[descriptions.TableParameter, ...] = description_of(self).tables
        return found


class Repeated(list[Any]):
    """A list of a message."""

    def __init__(self, of: "_Field") -> None:
        super().__init__()
        self._of = of

    def add(self) -> Message:
        """Adds a message with nothing in it, and returns it."""
        made = Message(self._of.type)
        super().append(made)
        return made

    def append(self, value: Any) -> None:
        self.extend([value])

    def extend(self, values: Iterable[Any]) -> None:
        for value in values:
            if self._of.is_message:
                self.add().CopyFrom(value)
            else:
                super().append(self._of.type(value))

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, list | tuple) else NotImplemented

    __hash__ = None


class _Trainers(Repeated):
    """The workers' configuration: a list in pslib, and one message in its predecessors."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._first(), name)

    def CopyFrom(self, other: Any) -> None:  # noqa: N802
        """Becomes one message."""
        del self[1:]
        self._first().CopyFrom(other)

    def _first(self) -> Message:
        return self[0] if self else self.add()


class _Field:
    """What may be in a field.

    Attributes:
        type: of a value.
        is_repeated: there may be several.
        is_message: values are messages.
    """

    def __init__(self, name: str, hint: Any) -> None:
        self.name = name
        self.type, self.is_repeated = type_of_field(hint)
        self.is_message = is_dataclass(self.type)

    def empty(self) -> Any:
        if not self.is_repeated:
            return Message(self.type)
        is_of_trainers = self.type is descriptions.DownpourTrainerParameter
        return _Trainers(self) if is_of_trainers else Repeated(self)

    @property
    def default(self) -> Any:
        return None if self.is_message or self.is_repeated else self.type()


@cache
def _fields_of(kind: type[Any]) -> dict[str, _Field]:
    return {name: _Field(name, hint) for name, hint in get_type_hints(kind).items()}


def description_of(given: Any) -> Any:
    """Returns the description that a message is; anything else as it is.

    As long as a message stays the same, so does its description: two that say the same are two
    jobs.
    """
    if isinstance(given, _Trainers):
        given = given._first()
    if not isinstance(given, Message):
        return given
    made = given._kind(**dict(_plain(given)))
    said = to_text(made)
    if given._described is None or given._described[0] != said:
        object.__setattr__(given, "_described", (said, made))
    return given._described[1]


def _plain(given: Message) -> Iterator[tuple[str, Any]]:
    """Yields the fields that are set, as descriptions have them."""
    for name, value in given._fields.items():
        if isinstance(value, Message):
            made = description_of(value)
            if made != type(made)():
                yield name, made
        elif isinstance(value, Repeated):
            yield name, tuple(description_of(item) for item in value)
        else:
            yield name, value
