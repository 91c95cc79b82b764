"""A program as bytes: JSON with a version and a checksum, everything of its parameters kept."""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from jaxfleet.fluid.block import Block
from jaxfleet.fluid.dtypes import VarType
from jaxfleet.fluid.operator import Operator
from jaxfleet.fluid.program import Program
from jaxfleet.fluid.strategies import plain_strategy
from jaxfleet.fluid.variable import Parameter, Variable
from jaxfleet.ir import Attrs, Size
from jaxfleet.ir.text import attr_text, attrs_text

FORMAT = "jaxfleet fluid program"
VERSION = 1
# What is said of a program besides its blocks, and is plain data.
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
    """Returns a program as bytes.

    Args:
        program: it.
        more: plain data that is kept beside it.

    Raises:
        ProgramError: a parameter's regularization or clipping is of a script's own class.
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
    """Returns a variable as plain data, without what is as usual."""
    plain: dict[str, Any] = {"name": variable.name, "dtype": variable.dtype}
    if variable.sizes is not None:
        plain["shape"] = [_size(size) for size in variable.sizes]
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


def _size(size: Size) -> int | str:
    return size if isinstance(size, int) else str(size)


def _value(value: Any) -> Any:
    """Returns an attribute as JSON has it; what JSON does not have is a table with one key."""
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
