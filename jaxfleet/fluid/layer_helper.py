"""LayerHelper: names, parameters in both programs, outputs and activations of layers."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxfleet.fluid import unique_name
from jaxfleet.fluid.argument_checks import mistake
from jaxfleet.fluid.framework.block import Block, Slots, check_redeclaration
from jaxfleet.fluid.framework.operator import Operator
from jaxfleet.fluid.framework.program import Program, default_main_program, default_startup_program
from jaxfleet.fluid.framework.variable import Parameter, Variable
from jaxfleet.fluid.initializer import Constant, Initializer, Xavier
from jaxfleet.fluid.param_attr import ParamAttr
from jaxfleet.ops.fluid import schema_of


class LayerHelper:
    """One layer under construction.

    Its name is made from `layer_type`, such as `fc`, unless given.
    """

    def __init__(self, layer_type: str, name: str | None = None) -> None:
        self.layer_type = layer_type
        self.name = name if name is not None else unique_name.generate(layer_type)

    @classmethod
    def named(cls, name: str) -> "LayerHelper":
        """Returns a helper for an existing name, without generating one."""
        return cls(name, name)

    @property
    def main_program(self) -> Program:
        return default_main_program()

    @property
    def block(self) -> Block:
        return self.main_program.current_block()

    def append_op(
        self,
        type: str,
        inputs: Slots = None,
        outputs: Slots = None,
        attrs: Mapping[str, Any] | None = None,
        stop_gradient: bool = False,
    ) -> Operator:
        return self.block.append_op(type, inputs, outputs, attrs, stop_gradient)

    def add(
        self,
        inputs: Slots,
        outputs: Mapping[str, str | Variable],
        attrs: Mapping[str, Any] | None = None,
        *,
        op_type: str | None = None,
        frozen: bool = False,
    ) -> list[Variable]:
        """Adds an operator and returns its outputs, in the order of `outputs`.

        An output is an existing variable, or the dtype of one to declare, at which gradients end if
        `frozen` is set. The operator type is the layer's unless given.
        """
        made = {
            slot: self.output(given, stop_gradient=frozen) if isinstance(given, str) else given
            for slot, given in outputs.items()
        }
        self.append_op(op_type or self.layer_type, inputs, made, attrs)
        return list(made.values())

    def output(self, dtype: str, *, stop_gradient: bool = False) -> Variable:
        """Declares an output of the layer: `fc_0.tmp_0`."""
        name = unique_name.generate(f"{self.name}.tmp")
        return self.block.create_var(name=name, dtype=dtype, stop_gradient=stop_gradient)

    def parameter(
        self,
        attr: ParamAttr,
        shape: Sequence[int],
        dtype: str,
        *,
        is_bias: bool = False,
        default_initializer: Initializer | None = None,
    ) -> Parameter:
        """Creates a parameter, and its initialization in the startup program."""
        name = attr.name or unique_name.generate(f"{self.name}.{'b' if is_bias else 'w'}")
        usual = default_initializer or (Constant(0.0) if is_bias else Xavier())
        described = {
            "name": name,
            "shape": list(shape),
            "dtype": dtype,
            "trainable": attr.trainable,
            "optimize_attr": {"learning_rate": attr.learning_rate},
            "regularizer": attr.regularizer,
            "do_model_average": attr.do_model_average,
        }
        startup = default_startup_program().global_block()
        if not startup.has_var(name):  # a parameter shared by layers is initialized once
            begun = startup.create_parameter(**described)
            (attr.initializer or usual)(begun, startup)
        home = self.main_program.global_block()
        known = home.vars.get(name)
        if isinstance(known, Parameter):
            check_redeclaration(known, Parameter(home, **described), described)
            return known
        return home.create_parameter(**described)

    def global_variable(
        self, name: str, shape: Sequence[int], dtype: str, value: float
    ) -> Variable:
        """Creates an initialized persistable variable."""
        startup = default_startup_program().global_block()
        described = {"name": name, "shape": list(shape), "dtype": dtype, "persistable": True}
        if not startup.has_var(name):
            Constant(value)(startup.create_var(**described), startup)
        return self.main_program.global_block().create_var(**described, stop_gradient=True)

    def with_bias(self, x: Variable, attr: Any, size: int, axis: int) -> Variable:
        """Adds a bias to a layer's output, unless `attr` is False."""
        found = ParamAttr.of(attr)
        if found is None:
            return x
        bias = self.parameter(found, [size], x.dtype, is_bias=True)
        inputs = {"X": x, "Y": bias}
        (out,) = self.add(inputs, {"Out": x.dtype}, {"axis": axis}, op_type="elementwise_add")
        return out

    def with_activation(self, x: Variable, act: str | None) -> Variable:
        """Applies the activation named by a layer's argument."""
        if act is None:
            return x
        schema = schema_of(act) if isinstance(act, str) else None
        if schema is None or [slot.name for slot in schema.inputs] != ["X"]:
            raise mistake(f"{self.layer_type}: there is no activation {act!r}", "such as 'relu'")
        (out,) = self.add({"X": x}, {"Out": x.dtype}, op_type=act)
        return out
