"""The protocol-buffer wire format of descriptions, with pslib's field numbers.

A description declares each field with its number and kind, as a `.proto` file does::

    @dataclass(frozen=True)
    class SummarySGDParameter:
        summary_decay_rate: float | None = optional(1, "double")

Fields are written by number, as protocol buffers do, so processes that describe the same job
produce the same bytes.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import Field, field, fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

import numpy as np

from jaxfleet.contrib.downpour.text_format import type_of_field
from jaxfleet.errors import FieldError, TextError

T = TypeVar("T")
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types
_SIZES = {_FIXED64: 8, _FIXED32: 4}
_FRACTIONS = {"double": (_FIXED64, struct.Struct("<d")), "float": (_FIXED32, struct.Struct("<f"))}
_INTEGERS = {  # kind -> minimum and maximum
    "bool": (0, 1),
    "int32": (-(1 << 31), (1 << 31) - 1),
    "uint32": (0, (1 << 32) - 1),
    "uint64": (0, (1 << 64) - 1),
}
_VARINT_BYTES = 10  # at most
_WORD = 1 << 64  # negative numbers are encoded with 64 bits


def optional(
    number: int, kind: str = "", names: Sequence[str] = (), *, required: bool = False
) -> Any:
    """Declares a field that is set at most once.

    Args:
        number: of the field.
        kind: `double`, `float`, `bool`, `int32`, `uint32`, `uint64`, `string` or `enum`; empty for
            a message.
        names: of an enumeration's values, from 0.
        required: encoding a message without the field is an error.
    """
    known = {"number": number, "kind": kind, "names": tuple(names), "required": required}
    return field(default=None, metadata=known)


def repeated(number: int, kind: str = "") -> Any:
    """Declares a repeated field; the arguments are those of `optional`."""
    return field(default=(), metadata={"number": number, "kind": kind})


def to_wire(description: Any) -> bytes:
    """Encodes a description in the protocol-buffer wire format.

    Raises:
        FieldError: a value is out of its field's range, or a required field is not set.
    """
    return b"".join(_written(description))


def _written(description: Any) -> Iterator[bytes]:
    for one in sorted(fields(description), key=_number):
        value = getattr(description, one.name)
        if value is None and one.metadata.get("required"):
            what = f"{type(description).__name__}: '{one.name}' is required, and is not set"
            raise FieldError(what)
        for item in value if isinstance(value, tuple) else () if value is None else (value,):
            wire_type, data = _encoded(one, item)
            yield _varint(_number(one) << 3 | wire_type) + data


def _number(one: Field[Any]) -> int:
    return int(one.metadata["number"])


def _encoded(one: Field[Any], value: Any) -> tuple[int, bytes]:
    """Encodes a value; returns its wire type and bytes."""
    kind = one.metadata["kind"]
    if kind in _FRACTIONS:
        wire_type, form = _FRACTIONS[kind]
        try:
            return wire_type, form.pack(value)
        except OverflowError:
            raise FieldError(f"'{one.name}' cannot be {value!r}: it is a {kind}") from None
    if kind == "enum":
        names = one.metadata["names"]
        if value not in names:
            what = f"'{one.name}' cannot be {value!r}"
            raise FieldError(what, hint=f"one of {', '.join(names)}")
        return _VARINT, _varint(names.index(value))
    if kind in _INTEGERS:
        least, greatest = _INTEGERS[kind]
        if not least <= value <= greatest:
            what = f"'{one.name}' cannot be {value}: {kind} is from {least} to {greatest}"
            raise FieldError(what)
        return _VARINT, _varint(int(value) % _WORD)
    data = value.encode() if kind == "string" else to_wire(value)
    return _BYTES, _varint(len(data)) + data


def _varint(number: int) -> bytes:
    made = bytearray()
    while number > 0x7F:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    made.append(number)
    return bytes(made)


def from_wire(data: bytes, kind: type[T]) -> T:
    """Decodes a description written by `to_wire` or by protocol buffers.

    As in protocol buffers, the last value of a singular field counts, messages are merged, and
    repeated fields may be packed.

    Raises:
        TextError: the bytes are malformed, or have a field that pslib lacks.
    """
    declared: Any = kind
    known = {_number(one): one for one in fields(declared)}
    hints, read = get_type_hints(kind), dict[str, list[Any]]()
    for number, wire_type, payload in _split(data, kind.__name__):
        if number not in known:
            raise TextError(f"{kind.__name__} has no field {number}")
        one = known[number]
        try:
            read.setdefault(one.name, []).extend(_decoded(one, wire_type, payload))
        except ValueError as error:
            what = f"{kind.__name__}: '{one.name}' cannot be read: {error}"
            raise TextError(what) from None
    made: dict[str, Any] = {}
    for name, values in read.items():
        wanted, is_repeated = type_of_field(hints[name])
        if is_dataclass(wanted):  # concatenating a message's parts merges them
            parts = values if is_repeated else [b"".join(values)]
            read[name] = [from_wire(part, wanted) for part in parts]  # type: ignore[arg-type]
        made[name] = tuple(read[name]) if is_repeated else read[name][-1]
    return kind(**made)


def _split(data: bytes, message: str) -> Iterator[tuple[int, int, Any]]:
    """Yields number, wire type and payload of each field."""
    at = 0
    while at < len(data):
        try:
            tag, after = _read_varint(data, at)
            payload, after = _read_payload(data, after, tag % 8)
        except ValueError as error:
            raise TextError(f"{message}, byte {at}: {error}") from None
        yield *divmod(tag, 8), payload
        at = after


def _read_payload(data: bytes, at: int, wire_type: int) -> tuple[Any, int]:
    """Reads a payload; returns it and its end."""
    if wire_type == _VARINT:
        return _read_varint(data, at)
    if wire_type == _BYTES:
        size, at = _read_varint(data, at)
    elif wire_type in _SIZES:
        size = _SIZES[wire_type]
    else:
        raise ValueError(f"there is no wire type {wire_type}")
    if at + size > len(data):
        raise ValueError("the bytes end in the middle")
    return data[at : at + size], at + size


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place, byte in enumerate(data[at : at + _VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:  # the highest bit marks continuation
            return value % _WORD, at + place + 1
    raise ValueError("a number does not end")


def _decoded(one: Field[Any], wire_type: int, payload: Any) -> Iterator[Any]:
    """Yields the values of a field, the bytes in case of a message; ValueError if malformed."""
    kind = one.metadata["kind"]
    wanted = _FRACTIONS[kind][0] if kind in _FRACTIONS else _BYTES if kind in _OF_BYTES else _VARINT
    is_packed = wire_type == _BYTES != wanted and one.default == ()
    if wire_type != wanted and not is_packed:
        raise ValueError(f"its wire type is {wire_type} instead of {wanted}")
    if wanted == _BYTES:
        yield payload.decode() if kind == "string" else payload
    elif kind in _FRACTIONS:
        form = _FRACTIONS[kind][1]
        if len(payload) % form.size:
            raise ValueError("the bytes end in the middle")
        for (value,) in form.iter_unpack(payload):
            yield value if kind == "double" else float(str(np.float32(value)))  # 0.98 stays 0.98
    else:
        at = 0
        while is_packed and at < len(payload):
            value, at = _read_varint(payload, at)
            yield _integer(one, value)
        if not is_packed:
            yield _integer(one, payload)


_OF_BYTES = ("string", "")


def _integer(one: Field[Any], value: int) -> Any:
    kind, names = one.metadata["kind"], one.metadata.get("names", ())
    if kind == "enum":
        if value >= len(names):
            raise ValueError(f"it has no value {value}")
        return names[value]
    if kind == "bool":
        return bool(value)
    least, greatest = _INTEGERS[kind]
    value %= greatest - least + 1  # truncated as in protocol buffers
    return value - (greatest - least + 1) if value > greatest else value
