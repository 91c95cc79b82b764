"""Descriptions in protocol buffers' wire format: compatible with pslib's own messages."""

import base64
import importlib
import re
import zlib
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

import pytest

from jaxfleet.contrib.downpour import descriptions, ps_pb2
from jaxfleet.contrib.downpour.descriptions import (
    PSParameter,
    TableAccessorParameter,
    TableParameter,
)
from jaxfleet.contrib.downpour.text_format import type_of_field
from jaxfleet.contrib.downpour.wire_format import from_wire, to_wire
from jaxfleet.errors import FieldError, TextError
from jaxfleet.fluid.distributed import from_text, to_text

# The bytes that fluid 1.8.5's pslib messages wrote for the text of `filled(PSParameter)`.
RECORDED = zlib.decompress(base64.b64decode(
    """
eNrjEizPL8pOLYpPzkksLlYwUDi8UkiwOLWoDEVISjgzr7gkMS85FUlQSSAzL7MkPj0tJzEdIrKKbTYP1wwerk42jsYGKGAU
EihJTMpB1ijRDJdUOsvKJZyYnJxaXJyP4gZVzlkzQWCnvSCEcdJe0sQYBC7bqzIwNDgACQcHqRQuzrzE3FSIHl08ehQhIjft
NRnA4IG9lBCmciVOuJgWgqnAosFqwGZlzAu0114UqNlBFmQ52Bm6DAwLHEwZGA442AINdXAFyjp6HPwPBYxOKhyMQnzJ+XnA
8CxJLYIEpkBKKqoIcaq8OhmRfSuD6Xyws2RBDpQiLvyUzEkKMrA/TUE+DhpEbokaRG7RYDRgtGB0hKh4ae/BOZoXRvPCaF6A
5IVNbLd5uG6MVg+jWWI0S4xWD6N5YTQvoOQFITsuzJ6HkGByTmZqXglyZ0QIpCoTpS8CSnevhNaxcU1g5PgJT1JCEimpecWp
8WWJRZngjIXwOlYZQ5DpihCZ9KLEFLDFmJoJKAGZovAE7ohB6CShOiQXCXyCM6V4i3PyS+KzUyshhiK4IAOU+MHcssScUoil
KAIgFVpCYAGYI8CK0MVA6gbafonXcCuRQkWLpzg7syA+vwCiD84D6TDK5OIvKMoHmpIbn5kCVoDkboGPcCaS0RKvsNmi8BjO
1LiLYN6BM+lo1WiOGc0xozmGFKtWyQcC2x8cpUWZkPDmLC2GNjmUuAuAlVE5xHokzbOY+TMSU/LzC+KTMvOgo2S8iWnF8cAW
SxqYDwDsTv7Z
"""
))  # fmt: skip


def filled(kind: type[Any]) -> Any:
    """Returns a description with distinct values in all fields."""
    made = {}
    for one in fields(kind):
        wanted, is_repeated = type_of_field(get_type_hints(kind)[one.name])
        values = [value_of(one, wanted, at) for at in range(1 + is_repeated)]
        made[one.name] = tuple(values) if is_repeated else values[0]
    return kind(**made)


def value_of(one: Any, wanted: Any, at: int) -> Any:
    if is_dataclass(wanted):
        return filled(wanted)  # type: ignore[arg-type]
    number, kind = one.metadata["number"], one.metadata["kind"]
    if kind == "enum":
        return one.metadata["names"][1]
    signs = {"int32": -7 * number, "uint64": (1 << 63) + number, "double": 0.1 * number}
    value = signs.get(kind, number) - at
    return f"{one.name} {at} é" if kind == "string" else wanted(value)


def test_the_bytes_are_those_of_the_originals_messages() -> None:
    description = filled(PSParameter)
    assert to_wire(description) == RECORDED
    assert to_text(from_wire(RECORDED, PSParameter)) == to_text(description)


def test_the_installed_protocol_buffers_read_the_bytes_and_write_them() -> None:
    pytest.importorskip("google.protobuf")
    description = filled(PSParameter)
    theirs = messages()["paddle.PSParameter"]()
    theirs.ParseFromString(description.SerializeToString())
    assert theirs.SerializeToString() == RECORDED
    assert to_text(from_text(str(theirs), PSParameter)) == to_text(description)
    ours = ps_pb2.PSParameter()
    assert ours.ParseFromString(theirs.SerializeToString()) == len(RECORDED)
    assert str(ours) == to_text(description)


def messages() -> dict[str, Any]:
    """Returns the installed protocol buffers' classes of the descriptions."""
    names = "descriptor_pb2", "descriptor_pool", "message_factory"
    descriptor_pb2, descriptor_pool, message_factory = (
        importlib.import_module(f"google.protobuf.{name}") for name in names
    )
    file: Any = descriptor_pb2.FileDescriptorProto(
        name="ps.proto", package="paddle", syntax="proto2"
    )
    scalars = descriptor_pb2.FieldDescriptorProto
    for kind in vars(descriptions).values():
        if not (isinstance(kind, type) and is_dataclass(kind)):
            continue
        message = file.message_type.add(name=kind.__name__)
        for one in fields(kind):
            wanted, is_repeated = type_of_field(get_type_hints(kind)[one.name])
            said = one.metadata
            how = "required" if said.get("required") else "repeated" if is_repeated else "optional"
            label = getattr(scalars, f"LABEL_{how.upper()}")
            field = message.field.add(name=one.name, number=said["number"], label=label)
            if is_dataclass(wanted):
                field.type = scalars.TYPE_MESSAGE
                field.type_name = f".paddle.{wanted.__name__}"  # type: ignore[union-attr]
            elif said["kind"] == "enum":
                field.type = scalars.TYPE_ENUM
                field.type_name = f".paddle.{kind.__name__}.{one.name}_names"
                values = message.enum_type.add(name=f"{one.name}_names")
                for number, name in enumerate(said["names"]):
                    values.value.add(name=name, number=number)
            else:
                field.type = getattr(scalars, f"TYPE_{said['kind'].upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClassesForFiles(["ps.proto"], pool)


def test_repeated_numbers_are_read_packed_too_and_parts_of_a_message_put_together() -> None:
    packed = b"\x0a\x017" + b"\x12\x03\x01\xac\x02"  # program_id, then [1, 300]
    read = from_wire(packed, descriptions.ProgramConfig)
    assert (read.program_id, read.push_sparse_table_id) == ("7", (1, 300))
    rule = b"\x22\x08" + b"\x00\x00\x80\x3f\x48\xe1\x7a\x3f"
    bounds = from_wire(rule, descriptions.SparseSGDRuleParameter).weight_bounds
    assert bounds == (1.0, 0.98)
    parts = [TableParameter(table_class="c"), TableParameter(table_class="d", shard_num=2)]
    assert from_wire(b"".join(map(to_wire, parts)), TableParameter) == parts[1]
    first, second = TableAccessorParameter(fea_dim=3), TableAccessorParameter(embedx_dim=8)
    whole = b"".join(to_wire(TableParameter(accessor=one)) for one in (first, second))
    both = TableAccessorParameter(fea_dim=3, embedx_dim=8)
    assert from_wire(whole, TableParameter) == TableParameter(accessor=both)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\xff", "TableParameter, byte 0: a number does not end"),
        (b"\x12\x05ab", "TableParameter, byte 0: the bytes end in the middle"),
        (b"\x08\x01\x13", "TableParameter, byte 2: there is no wire type 3"),
        (b"\x98\x06\x01", "TableParameter has no field 99"),
        (
            b"\x0a\x01a",
            "TableParameter: 'table_id' cannot be read: its wire type is 2 instead of 0",
        ),
        (b"\x12\x01\xff", "TableParameter: 'table_class' cannot be read: 'utf-8'"),
        (b"\x28\x07", "TableParameter: 'type' cannot be read: it has no value 7"),
        (b"\x22\x03\x20\x80", "TableParameter, byte 0: the bytes end in the middle"),
    ],
)
def test_bytes_that_are_no_such_message_are_refused(data: bytes, said: str) -> None:
    with pytest.raises(TextError, match=re.escape(said)):
        from_wire(data, TableParameter)


@pytest.mark.parametrize(
    ("description", "said"),
    [
        (TableParameter(table_id=-1), "'table_id' cannot be -1: uint64 is from 0 to"),
        (TableParameter(type="PS_TABLE"), "'type' cannot be 'PS_TABLE'"),
        (descriptions.ProgramConfig(), "ProgramConfig: 'program_id' is required, and is not set"),
        (
            descriptions.SparseSGDRuleParameter(weight_bounds=(1e39,)),
            "'weight_bounds' cannot be 1e+39: it is a float",
        ),
    ],
)
def test_what_protocol_buffers_cannot_write_is_refused(description: Any, said: str) -> None:
    with pytest.raises(FieldError, match=re.escape(said)):
        to_wire(description)
