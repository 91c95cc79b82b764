"""Operators run individually over a scope: `Operator("sgd", Param="w", ...).run(scope, place)`.

Selected rows of a variable (`get_selected_rows()`) are processed in numpy: as the whole array, or
row by row if the operator outputs rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxfleet.errors import ProgramError, UnsupportedError
from jaxfleet.fluid.argument_checks import mistake
from jaxfleet.fluid.executor import Executor
from jaxfleet.fluid.framework.program import Program
from jaxfleet.fluid.scope import Scope, SelectedRows
from jaxfleet.ops.fluid import Schema, schema_of


@dataclass(frozen=True)
class OneOperator:
    """An operator with the names of its operands."""

    type: str  # the operator type
    inputs: Mapping[str, list[str]]  # names by slot
    outputs: Mapping[str, list[str]]  # names by slot
    attrs: Mapping[str, Any]  # its attributes

    def run(self, scope: Scope, place: Any = None) -> None:
        """Runs once over the values in a scope, and writes the results to it.

        Raises:
            ProgramError: an input has no value.
        """
        rows = {
            name: scope.selected_rows[name]
            for names in self.inputs.values()
            for name in names
            if name in scope.selected_rows
        }
        if rows and self.type in _ROW_BY_ROW:
            _ROW_BY_ROW[self.type](self, scope)
            return
        inside = Scope(scope)
        for name, found in rows.items():
            inside.var(name).get_tensor().set(found.to_array())
        program = Program()
        block = program.global_block()
        for name in [name for names in self.inputs.values() for name in names]:
            value = _value(inside, name)
            block.create_var(
                name=name, shape=list(value.shape), dtype=value.dtype.name, persistable=True
            )
        for name in [name for names in self.outputs.values() for name in names]:
            if not block.has_var(name):
                block.create_var(name=name, persistable=True)
            scope.var(name)
        block.append_op(self.type, dict(self.inputs), dict(self.outputs), dict(self.attrs))
        Executor(place).run(program, scope=inside)


class OperatorFactory:
    """Creates operators by their type: `fluid.op.Operator`."""

    def __call__(self, *args: str, **kwargs: Any) -> OneOperator:
        """Creates an operator.

        Its type is the only positional argument, unless `type` is given. Keyword arguments are a
        name, or a list of names, for each slot, and a value for each attribute. Raises ValueError
        if there is no such type, slot or attribute, or there are more positional arguments than the
        type.
        """
        words = [*args, *([kwargs.pop("type")] if "type" in kwargs else [])]
        if len(words) != 1:
            raise mistake("an operator has one type, and all else by keywords", "Operator('sgd')")
        schema = self._schema(words[0])
        inputs = {slot.name for slot in schema.inputs}
        outputs = {slot.name for slot in schema.outputs}
        if unknown := kwargs.keys() - inputs - outputs - schema.attrs.keys():
            what = f"operator '{words[0]}' has no {min(unknown)!r}"
            raise mistake(what, f"it has {', '.join(sorted(inputs | outputs | set(schema.attrs)))}")
        return OneOperator(
            words[0],
            {slot: _names(kwargs[slot]) for slot in kwargs if slot in inputs},
            {slot: _names(kwargs[slot]) for slot in kwargs if slot in outputs},
            {name: _plain(kwargs[name]) for name in kwargs if name in schema.attrs},
        )

    def get_op_input_names(self, type: str) -> list[str]:
        return [slot.name for slot in self._schema(type).inputs]

    def get_op_output_names(self, type: str) -> list[str]:
        return [slot.name for slot in self._schema(type).outputs]

    def get_op_attr_names(self, type: str) -> list[str]:
        return list(self._schema(type).attrs)

    def _schema(self, type: str) -> Schema:
        found = schema_of(type)
        if found is None:
            raise mistake(f"The operator: {type} is not registered", "docs/fluid-differences.md")
        return found


Operator = OperatorFactory()


def _names(given: Any) -> list[str]:
    return [given] if isinstance(given, str) else list(given)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _value(scope: Scope, name: str) -> np.ndarray:
    found = scope.find_var(name)
    if found is None or not found.get_tensor()._is_initialized():
        raise ProgramError(f"'{name}' has no value in the scope", hint="set it before the run")
    return np.array(found.get_tensor())


# --- rows to rows ------------------------------------------------------------------------------


def _one(op: OneOperator, scope: Scope) -> SelectedRows:
    (name,) = op.inputs["X"]
    return scope.selected_rows[name]


def _put(op: OneOperator, scope: Scope, rows: list[int], height: int, values: np.ndarray) -> None:
    (name,) = op.outputs["Out"]
    made = scope.var(name).get_selected_rows()
    made.set_rows(rows)
    made.set_height(height)
    made.get_tensor().set(values)


def _scale(op: OneOperator, scope: Scope) -> None:
    given = _one(op, scope)
    values = given.value() * op.attrs.get("scale", 1.0) + op.attrs.get("bias", 0.0)
    _put(op, scope, given.rows(), given.height(), values.astype(given.value().dtype))


def _merge(op: OneOperator, scope: Scope) -> None:
    given = _one(op, scope)
    rows, places = np.unique(np.array(given.rows(), np.int64), return_inverse=True)
    values = np.zeros((len(rows), *given.value().shape[1:]), given.value().dtype)
    np.add.at(values, places, given.value())
    _put(op, scope, rows.tolist(), given.height(), values)


def _sum(op: OneOperator, scope: Scope) -> None:
    names = op.inputs["X"]
    given = [scope.selected_rows.get(name) for name in names]
    if any(one is None for one in given):
        whole = sum(
            _value(scope, name) if one is None else one.to_array()
            for name, one in zip(names, given, strict=True)
        )
        (out,) = op.outputs["Out"]
        scope.var(out).get_tensor().set(whole)
        return
    parts = [one for one in given if one is not None and one.rows()]
    rows = [row for one in parts for row in one.rows()]
    height = max((one.height() for one in given if one is not None), default=0)
    values = np.concatenate([one.value() for one in parts]) if parts else np.zeros((0, 0), "f4")
    _put(op, scope, rows, height, values)


def _tensor(op: OneOperator, scope: Scope) -> None:
    (out,) = op.outputs["Out"]
    scope.var(out).get_tensor().set(_one(op, scope).value())


def _refuse(op: OneOperator, scope: Scope) -> None:
    del scope
    what = f"operator '{op.type}' takes no rows here"
    raise UnsupportedError(what, hint="set an array, or run it within a program")


_ROW_BY_ROW = {
    "scale": _scale,
    "merge_selected_rows": _merge,
    "sum": _sum,
    "get_tensor_from_selected_rows": _tensor,
    "split_selected_rows": _refuse,
}
