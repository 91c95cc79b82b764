"""A program from the bytes that `serialize` made of it."""

import json
from collections.abc import Mapping
from typing import Any

from jaxfleet.errors import ProgramError
from jaxfleet.fluid.block import Block
from jaxfleet.fluid.operator import Operator
from jaxfleet.fluid.program import Program
from jaxfleet.fluid.serialize import FINDINGS, FLAGS, FORMAT, OF_PARAMETERS, VERSION, digest
from jaxfleet.fluid.strategies import strategy_of
from jaxfleet.fluid.variable import Parameter, Variable
from jaxfleet.ir import Source, parse, parse_size


def deserialize(data: bytes, what: str = "the program") -> tuple[Program, dict[str, Any]]:
    """Returns a program, and the plain data that was kept beside it.

    Args:
        data: what `serialize` returned.
        what: how an error names it, such as by its file.

    Raises:
        ProgramError: it is damaged, of a newer version, or something else altogether.
    """
    content = _content(data, what)
    try:
        return _program(content), dict(content["more"])
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ProgramError(f"{what} is damaged: {error!r}", hint="save it again") from error


def _content(data: bytes, what: str) -> dict[str, Any]:
    """Returns what was sealed, once its checksum is found to be right."""
    try:
        sealed = json.loads(data)
        found, version = sealed["format"], sealed["version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        hint = "it is read from what Program.serialize_to_string returned, or what was saved"
        raise ProgramError(f"{what} is damaged, or none of ours: {error!r}", hint=hint) from error
    if found != FORMAT or version != VERSION:
        text = f"{what} is of format {found!r}, version {version!r}"
        hint = f"this jaxfleet reads {FORMAT!r}, version {VERSION}"
        raise ProgramError(text, hint=hint)
    content = sealed.get("program")
    if not isinstance(content, dict) or digest(content) != sealed.get("sha256"):
        text = f"{what} is damaged: its content has another checksum than it says"
        raise ProgramError(text, hint="save it again")
    return content


def _program(content: Mapping[str, Any]) -> Program:
    program = Program()
    program._seed = content["seed"]
    heading = f"program facts {content['facts']}\n  block 0\n"
    program._facts = dict(parse(heading).attrs)
    for name in FINDINGS:
        setattr(program, name, content["findings"][name])
    for plain in content["blocks"][1:]:
        program._create_block(plain["parent"])
    program.current_block_idx = content["current_block"]
    for block, plain in zip(program.blocks, content["blocks"], strict=True):
        block.forward_block_idx = plain["forward"]
        for variable in plain["vars"]:
            block._declare(_variable(block, variable))
    for block, plain in zip(program.blocks, content["blocks"], strict=True):
        block.ops = [_operator(block, op) for op in plain["ops"]]
        for variable in block.all_parameters():
            variable.optimize_attr = _rates(block, variable.optimize_attr)
    return program


def _variable(block: Block, plain: Mapping[str, Any]) -> Variable:
    said = {key: plain[key] for key in ("name", "dtype", "type", "lod_level") if key in plain}
    said |= {flag: plain[flag] for flag in FLAGS if flag in plain}
    said["error_clip"] = strategy_of(plain.get("error_clip"))
    sizes = tuple(_size(size) for size in plain["shape"]) if "shape" in plain else None
    if "parameter" in plain:
        return _parameter(block, said, sizes, plain["parameter"])
    made = Variable(block, **said)
    made.sizes = sizes
    return made


def _parameter(block: Block, said: Any, sizes: Any, plain: Mapping[str, Any]) -> Parameter:
    return Parameter(
        block,
        shape=sizes,
        **said,
        **{name: plain[name] for name in OF_PARAMETERS},
        optimize_attr=plain["optimize_attr"],
        regularizer=strategy_of(plain["regularizer"]),
        gradient_clip_attr=strategy_of(plain["gradient_clip_attr"]),
    )


def _rates(block: Block, plain: Mapping[str, Any]) -> dict[str, Any]:
    return {k: block.var(v["var"]) if isinstance(v, dict) else v for k, v in plain.items()}


def _operator(block: Block, plain: Mapping[str, Any]) -> Operator:
    file, line, function = plain["source"]
    attrs = {name: _value(block.program, value) for name, value in plain["attrs"].items()}
    source = Source(file, line, function)
    return Operator(block, plain["type"], plain["inputs"], plain["outputs"], attrs, source)


def _size(plain: int | str) -> Any:
    return plain if isinstance(plain, int) else parse_size(plain)


def _value(program: Program, plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(program, x) for x in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, value),) = plain.items()
    match kind:
        case "block":
            return program.block(value)
        case "tuple":
            return tuple(_value(program, x) for x in value)
        case "float":
            return float(value)
        case "ir":
            return parse(f"program one {{value={value}}}\n  block 0\n").attrs["value"]
    raise ValueError(f"{plain} is no attribute")
