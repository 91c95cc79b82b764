"""CompiledProgram: programs for several devices, and the strategies that steer them."""

from jaxfleet.fluid.compiler.compiled_program import CompiledProgram as CompiledProgram
from jaxfleet.fluid.compiler.compiled_program import Graph as Graph
from jaxfleet.fluid.compiler.strategies import BuildStrategy as BuildStrategy
from jaxfleet.fluid.compiler.strategies import ExecutionStrategy as ExecutionStrategy
