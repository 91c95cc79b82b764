"""Meanings of operators: the registry, jax's primitives, and fluid's families."""

from jaxfleet.ops import basic as basic
from jaxfleet.ops import collective as collective
from jaxfleet.ops import exported as exported
from jaxfleet.ops import fluid as fluid
from jaxfleet.ops import jax_ops as jax_ops
from jaxfleet.ops import pserver_ops as pserver_ops
from jaxfleet.ops import sharded_random as sharded_random
from jaxfleet.ops.interpret import Interpreter as Interpreter
from jaxfleet.ops.registry import Array as Array
from jaxfleet.ops.registry import Context as Context
from jaxfleet.ops.registry import Dialect as Dialect
from jaxfleet.ops.registry import Meaning as Meaning
from jaxfleet.ops.registry import OpDef as OpDef
from jaxfleet.ops.registry import find_op as find_op
from jaxfleet.ops.registry import known_ops as known_ops
from jaxfleet.ops.registry import register_dialect as register_dialect
from jaxfleet.ops.registry import register_op as register_op
