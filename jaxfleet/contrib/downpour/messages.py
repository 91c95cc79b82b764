"""Descriptions with the methods of protocol buffers, as scripts build them.

::

    ps_param = PSParameter()
    ps_param.server_param.CopyFrom(server.get_desc())
    ps_param.trainer_param.skip_op.extend(["lookup_table"])
    text_format.Merge(text, ps_param)

A message is a mutable view with the fields of a description in `descriptions`; `description_of`
returns that description. A field that was not set reads as in protocol buffers: an empty message,
an empty list, or 0. `SerializeToString` returns protocol buffers' bytes (`wire_format`), and `str`
the text form.
"""

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, get_type_hints

from jaxfleet.contrib.downpour import descriptions
from jaxfleet.contrib.downpour.text_format import from_text, to_text, type_of_field
from jaxfleet.contrib.downpour.wire_format import from_wire, to_wire
from jaxfleet.errors import FieldError
from jaxfleet.fluid.argument_checks import check_type, mistake


class Message:
    """A mutable description of class `kind`."""

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
        """Builds the message of a description."""
        made = cls(type(description))
        made.MergeFrom(description)
        return made

    def CopyFrom(self, other: Any) -> None:  # noqa: N802  # protocol buffers' name
        """Replaces all fields by those of a message or description of the same kind."""
        given = description_of(other)
        check_type(given, "what CopyFrom is given", self._kind)
        self.Clear()
        self.MergeFrom(given)

    def MergeFrom(self, other: Any) -> None:  # noqa: N802
        """Merges the set fields of another message; lists are appended."""
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
        self._fields.clear()

    def HasField(self, name: str) -> bool:  # noqa: N802
        """Whether a field is set; not for lists."""
        return getattr(description_of(self), name) is not None

    def SerializeToString(self) -> bytes:  # noqa: N802
        """Encodes the message in the protocol-buffer wire format.

        Raises:
            FieldError: a value is out of its field's range, or a required field is not set.
        """
        return to_wire(description_of(self))

    def ParseFromString(self, data: bytes) -> int:  # noqa: N802
        """Replaces all fields by those of encoded bytes; returns the number of bytes.

        Raises:
            TextError: the bytes are malformed.
        """
        self.CopyFrom(from_wire(data, self._kind))
        return len(data)

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
        """The servers' tables, in the message of a whole job."""
        found: tuple[descriptions.TableParameter, ...] = description_of(self).tables
        return found


class Repeated(list[Any]):
    """A repeated field."""

    def __init__(self, of: "_Field") -> None:
        super().__init__()
        self._of = of

    def add(self) -> Message:
        """Appends an empty message and returns it."""
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
        """Keeps a single message, and replaces its fields."""
        del self[1:]
        self._first().CopyFrom(other)

    def _first(self) -> Message:
        return self[0] if self else self.add()


class _Field:
    """Type of a field's values, and whether it is repeated or holds messages."""

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
    """The description of a message; any other argument unchanged.

    It is cached while the message is unchanged, since jobs are compared by identity.
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
    for name, value in given._fields.items():
        if isinstance(value, Message):
            made = description_of(value)
            if made != type(made)():
                yield name, made
        elif isinstance(value, Repeated):
            yield name, tuple(description_of(item) for item in value)
        else:
            yield name, value


def Merge(text: str, message: Message) -> Message:  # noqa: N802  # protocol buffers' name
    """Merges the fields of a text into a message, and returns the message.

    Raises:
        TextError: the text is malformed, or sets an unknown field.
    """
    message.MergeFrom(from_text(text, message._kind))
    return message


Parse = Merge


def MessageToString(message: Message) -> str:  # noqa: N802
    """Formats a message as text."""
    return str(message)
