"""Programs as bytes: versioned JSON with a checksum, including the attributes of parameters."""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from jaxfleet.errors import ProgramError
from jaxfleet.fluid.clip import (
    ErrorClipByValue,
    GradientClipByGlobalNorm,
    GradientClipByNorm,
    GradientClipByValue,
)
from jaxfleet.fluid.framework.block import Block
from jaxfleet.fluid.framework.operator import Operator
from jaxfleet.fluid.framework.program import Program
from jaxfleet.fluid.framework.types import VarType
from jaxfleet.fluid.framework.variable import Parameter, Variable
from jaxfleet.fluid.regularizer import L1DecayRegularizer, L2DecayRegularizer
from jaxfleet.ir import Attrs, Source, parse, parse_size
from jaxfleet.ir.printer import attr_text, attrs_text

# By name: the class, and the attribute of each argument.
_KINDS: Mapping[str, tuple[type[Any], Mapping[str, str]]] = {
    "l1_decay": (L1DecayRegularizer, {"regularization_coeff": "_coeff"}),
    "l2_decay": (L2DecayRegularizer, {"regularization_coeff": "_coeff"}),
    "clip_by_value": (GradientClipByValue, {"max": "max", "min": "min"}),
    "clip_by_norm": (GradientClipByNorm, {"clip_norm": "clip_norm"}),
    "clip_by_global_norm": (
        GradientClipByGlobalNorm,
        {"clip_norm": "clip_norm", "group_name": "group_name"},
    ),
    "error_clip_by_value": (ErrorClipByValue, {"max": "max", "min": "min"}),
}


def plain_strategy(strategy: Any, whose: str) -> dict[str, Any] | None:
    """Returns a regularizer or clipping as plain data; None for none.

    Raises ProgramError if the strategy is of a custom class, or depends on a function.
    """
    if strategy is None:
        return None
    for kind, (known, arguments) in _KINDS.items():
        if type(strategy) is known and getattr(strategy, "_need_clip", None) is None:
            return {"kind": kind, **{name: getattr(strategy, at) for name, at in arguments.items()}}
    what = f"{type(strategy).__name__} of '{whose}' cannot be written as text"
    raise ProgramError(what, hint="take it off, or one of fluid's without need_clip")


def strategy_of(plain: Mapping[str, Any] | None) -> Any:
    """Restores a strategy from plain data; ValueError if the data does not describe one."""
    if plain is None:
        return None
    arguments = dict(plain)
    kind = arguments.pop("kind", None)
    if kind not in _KINDS or arguments.keys() != _KINDS[kind][1].keys():
        raise ValueError(f"{dict(plain)} is no strategy")
    return _KINDS[kind][0](**arguments)


FORMAT = "jaxfleet fluid program"
VERSION = 1
# Attributes of a program besides its blocks that are plain data.
FINDINGS = (
    "_is_distributed",
    "_is_chief",
    "_endpoints",
    "_ps_endpoint",
    "_distributed_lookup_table",
    "_trainers_endpoints",
    "_nccl_comm_num",
    "_use_hierarchical_allreduce",
    "_hierarchical_allreduce_inter_nranks",
    "_enable_dgc",
    "_use_lamb",
    "_is_mem_optimized",
    "_appending_grad_times",
)
FLAGS = ("persistable", "stop_gradient", "is_data", "need_check_feed")
OF_PARAMETERS = ("trainable", "do_model_average", "need_clip", "is_distributed")


def serialize(program: Program, *, more: Mapping[str, Any] | None = None) -> bytes:
    """Returns a program, with additional plain data, as bytes.

    Raises ProgramError if a parameter's regularization or clipping is of a custom class.
    """
    content = {
        "seed": program.random_seed,
        "current_block": program.current_block_idx,
        "facts": attrs_text(Attrs(program._facts)),
        "findings": {name: getattr(program, name) for name in FINDINGS},
        "blocks": [_block(block) for block in program.blocks],
        "more": dict(more or {}),
    }
    sealed = {"format": FORMAT, "version": VERSION, "sha256": digest(content), "program": content}
    return json.dumps(sealed, indent=1, allow_nan=False).encode()


def digest(content: Any) -> str:
    """Returns the checksum of plain data."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _block(block: Block) -> dict[str, Any]:
    return {
        "parent": block.parent_idx,
        "forward": block.forward_block_idx,
        "vars": [_variable(variable) for variable in block.vars.values()],
        "ops": [_operator(op) for op in block.ops],
    }


def _variable(variable: Variable) -> dict[str, Any]:
    """Returns a variable as plain data, without default values."""
    plain: dict[str, Any] = {"name": variable.name, "dtype": variable.dtype}
    if variable.sizes is not None:
        plain["shape"] = [size if isinstance(size, int) else str(size) for size in variable.sizes]
    if variable.type != VarType.LOD_TENSOR:
        plain["type"] = variable.type
    if variable.lod_level:
        plain["lod_level"] = variable.lod_level
    plain |= {flag: True for flag in FLAGS if getattr(variable, flag)}
    if variable.error_clip is not None:
        plain["error_clip"] = plain_strategy(variable.error_clip, variable.name)
    if isinstance(variable, Parameter):
        plain["parameter"] = _parameter(variable)
    return plain


def _parameter(parameter: Parameter) -> dict[str, Any]:
    rates = parameter.optimize_attr.items()
    return {
        **{name: getattr(parameter, name) for name in OF_PARAMETERS},
        "optimize_attr": {k: {"var": v.name} if isinstance(v, Variable) else v for k, v in rates},
        "regularizer": plain_strategy(parameter.regularizer, parameter.name),
        "gradient_clip_attr": plain_strategy(parameter.gradient_clip_attr, parameter.name),
    }


def _operator(op: Operator) -> dict[str, Any]:
    source = op.source
    return {
        "type": op.type,
        "inputs": op.inputs,
        "outputs": op.outputs,
        "attrs": {name: _value(value) for name, value in op.attrs.items()},
        "source": [source.file, source.line, source.function],
    }


def _value(value: Any) -> Any:
    """Returns an attribute as JSON; a value without a JSON form becomes a table with one key."""
    if isinstance(value, Block):
        return {"block": value.idx}
    if isinstance(value, tuple):
        return {"tuple": [_value(x) for x in value]}
    if isinstance(value, list):
        return [_value(x) for x in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return {"ir": attr_text(value)}


def deserialize(data: bytes, what: str = "the program") -> tuple[Program, dict[str, Any]]:
    """Restores a program and the plain data stored with it; errors name `what` as the source.

    Raises ProgramError if the data is damaged, of a newer version, or not a program.
    """
    content = _content(data, what)
    try:
        return _program(content), dict(content["more"])
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ProgramError(f"{what} is damaged: {error!r}", hint="save it again") from error


def _content(data: bytes, what: str) -> dict[str, Any]:
    """Returns the sealed content after verifying its checksum."""
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
        text = f"{what} is damaged: its content does not match its checksum"
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
            block._declare(_deserialize_variable(block, variable))
    for block, plain in zip(program.blocks, content["blocks"], strict=True):
        block.ops = [_deserialize_operator(block, op) for op in plain["ops"]]
        for variable in block.all_parameters():
            variable.optimize_attr = _rates(block, variable.optimize_attr)
    return program


def _deserialize_variable(block: Block, plain: Mapping[str, Any]) -> Variable:
    said = {key: plain[key] for key in ("name", "dtype", "type", "lod_level") if key in plain}
    said |= {flag: plain[flag] for flag in FLAGS if flag in plain}
    said["error_clip"] = strategy_of(plain.get("error_clip"))
    sizes = tuple(_deserialize_size(size) for size in plain["shape"]) if "shape" in plain else None
    if "parameter" in plain:
        return _deserialize_parameter(block, said, sizes, plain["parameter"])
    made = Variable(block, **said)
    made.sizes = sizes
    return made


def _deserialize_parameter(
    block: Block, said: Any, sizes: Any, plain: Mapping[str, Any]
) -> Parameter:
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


def _deserialize_operator(block: Block, plain: Mapping[str, Any]) -> Operator:
    file, line, function = plain["source"]
    attrs = {
        name: _deserialize_value(block.program, value) for name, value in plain["attrs"].items()
    }
    source = Source(file, line, function)
    return Operator(block, plain["type"], plain["inputs"], plain["outputs"], attrs, source)


def _deserialize_size(plain: int | str) -> Any:
    return plain if isinstance(plain, int) else parse_size(plain)


def _deserialize_value(program: Program, plain: Any) -> Any:
    if isinstance(plain, list):
        return [_deserialize_value(program, x) for x in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, value),) = plain.items()
    match kind:
        case "block":
            return program.block(value)
        case "tuple":
            return tuple(_deserialize_value(program, x) for x in value)
        case "float":
            return float(value)
        case "ir":
            return parse(f"program one {{value={value}}}\n  block 0\n").attrs["value"]
    raise ValueError(f"{plain} is no attribute")
