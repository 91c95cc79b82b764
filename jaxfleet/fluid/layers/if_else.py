"""`IfElse`: two blocks, one for the rows that satisfy a condition, one for the others."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jaxfleet.fluid.argument_checks import check_type, mistake
from jaxfleet.fluid.framework.block import Block
from jaxfleet.fluid.framework.operator import Operator
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.control_flow import conditional_block
from jaxfleet.fluid.layers.math_ops import logical_not, reduce_any
from jaxfleet.fluid.layers.tensor import assign
from jaxfleet.ir import Size
from jaxfleet.ops.fluid import EMPTY

_MIX_ROWS = frozenset(
    {"batch_norm", "data_norm", "cumsum", "reverse", "transpose2", "gather", "scatter", "argsort"}
)
_ALONG_AXIS = frozenset({"softmax", "log_softmax", "softmax_with_cross_entropy", "norm"})


class IfElse:
    """Computes the rows for which a condition holds in one block, and the others in another.

    ::

        choice = layers.IfElse(layers.less_than(label, limit))  # bool[b,1]
        with choice.true_block():
            choice.output(layers.fc(choice.input(x), 10))
        with choice.false_block():
            choice.output(layers.fc(choice.input(x), 10))
        (out,) = choice()  # f32[b,10]

    A block runs if it has rows. Its result for a row must not depend on other rows.
    """

    OUT_IF_ELSE_BLOCKS, IN_IF_ELSE_TRUE_BLOCKS, IN_IF_ELSE_FALSE_BLOCKS = 0, 1, 2

    def __init__(self, cond: Variable, name: str | None = None) -> None:
        check_type(cond, "the condition of IfElse", Variable)
        if cond.dtype != "bool" or not cond.sizes or cond.sizes[1:] not in {(), (1,)}:
            raise mistake(f"IfElse: the condition is bool[b,1], and '{cond.name}' is {cond}")
        self.cond = cond
        self.helper = LayerHelper("ifelse", name)
        self._parts: dict[str, tuple[Variable, Variable]] = {}
        self._outputs: tuple[list[Variable], list[Variable]] = ([], [])  # if true, if false
        self._side = -1  # the open block: 0 for true, 1 for false
        self._outer: Block = self.helper.block

    @contextmanager
    def true_block(self) -> Iterator[None]:
        """Opens the block for rows whose condition is true."""
        with self._building(0, self.cond):
            yield

    @contextmanager
    def false_block(self) -> Iterator[None]:
        """Opens the block for the other rows."""
        with self._building(1, logical_not(self.cond)):
            yield

    def input(self, x: Variable) -> Variable:
        """The open block's rows of a variable, which must have the batch's rows."""
        self._check_open("input")
        check_type(x, "the input of IfElse", Variable)
        if not x.sizes or x.sizes[0] != self._rows:
            raise mistake(f"IfElse: '{x.name}' has not as many rows as the condition")
        if x.name not in self._parts:
            block, program = self.helper.block, self.helper.main_program
            program.current_block_idx = self._outer.idx
            slots = {"X": x, "Mask": self.cond}, {"OutTrue": x.dtype, "OutFalse": x.dtype}
            if_true, if_false = self.helper.add(*slots, op_type="split_lod_tensor")
            program.current_block_idx = block.idx
            self._parts[x.name] = if_true, if_false
        return self._parts[x.name][self._side]

    def output(self, *outs: Variable) -> None:
        """Sets the results of the open block for its rows."""
        self._check_open("output")
        for one in outs:
            check_type(one, "an output of IfElse", Variable)
            name = self._outer.program.unique_name(f"{self.helper.name}.out")
            kept = self._outer.create_var(name=name, dtype=one.dtype)
            kept.sizes = one.sizes
            self._outputs[self._side].append(assign(one, kept))

    def __call__(self) -> list[Variable]:
        """Merges the results of both blocks, in the order of the rows.

        Raises:
            ProgramError: the blocks have different results.
        """
        if_true, if_false = self._outputs
        if not if_true or [x.sizes for x in if_true] != [x.sizes for x in if_false]:
            what = f"true_block makes {if_true}, and false_block {if_false}"
            raise mistake(f"IfElse: {what}", "output as many variables of equal shapes from both")
        merged = []
        for pair in zip(if_true, if_false, strict=True):
            inputs: dict[str, Any] = {"Mask": self.cond, "InTrue": pair[0], "InFalse": pair[1]}
            out = {"Out": pair[0].dtype}
            merged += self.helper.add(inputs, out, op_type="merge_lod_tensor")
        return merged

    @property
    def _rows(self) -> Size:
        assert self.cond.sizes is not None
        return self.cond.sizes[0]

    @contextmanager
    def _building(self, side: int, condition: Variable) -> Iterator[None]:
        if self._side >= 0:
            raise mistake("IfElse: one of its blocks is opened within the other")
        has_rows = reduce_any(condition, keep_dim=False)
        self._side, self._outer = side, self.helper.block
        try:
            with conditional_block(has_rows):
                yield
                self._check_rows(self.helper.block)
        finally:
            self._side = -1

    def _check_rows(self, inner: Block) -> None:
        """Rejects an operator that mixes rows."""
        for op in inner.ops:
            for block in op._inner_blocks():
                self._check_rows(block)
            read = [inner._var_recursive(name) for name in op.input_arg_names if name != EMPTY]
            if not any(v.sizes and v.sizes[0] == self._rows for v in read):
                continue
            made = [inner._var_recursive(name) for name in op.output_arg_names if name != EMPTY]
            kept = all(v.sizes and v.sizes[0] in {0, self._rows} for v in made)
            is_paired = any(self._rows in v.sizes[1:] for v in made if v.sizes)  # such as x @ x.T
            if op.type in _MIX_ROWS or not kept or is_paired or _goes_along_rows(inner, op):
                hint = "do it behind the IfElse, with what the blocks make of each row"
                raise mistake(f"IfElse: '{op.type}' puts the rows of a block together", hint)

    def _check_open(self, what: str) -> None:
        if self._side < 0:
            raise mistake(f"IfElse: {what} is called outside true_block and false_block")


def _goes_along_rows(block: Block, op: Operator) -> bool:
    """Whether an operator normalizes along axis 0."""
    slots = op.input("X")
    if op.type == "layer_norm":
        return bool(op.attr("begin_norm_axis") == 0)
    if not slots or op.type not in _ALONG_AXIS:
        return False
    sizes = block._var_recursive(slots[0]).sizes
    return bool(sizes) and op.attr("axis") in {0, -len(sizes or ())}
