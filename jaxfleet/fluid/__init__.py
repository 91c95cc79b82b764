"""The fluid front end: programs built layer by layer, under fluid's names.

::

    x = fluid.data("x", [None, 13])
    y = fluid.data("y", [None, 1])
    loss = fluid.layers.mean(fluid.layers.square_error_cost(fluid.layers.fc(x, 1), y))
    fluid.optimizer.SGD(0.01).minimize(loss)
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(fluid.default_startup_program())
    (value,) = exe.run(feed={"x": rows, "y": wanted}, fetch_list=[loss])

A program here is a builder over the IR (`jaxfleet.ir`), and is converted to it when it runs.
"""

from jaxfleet.fluid import clip as clip
from jaxfleet.fluid import communicator as communicator
from jaxfleet.fluid import contrib as contrib
from jaxfleet.fluid import core as core
from jaxfleet.fluid import distributed as distributed
from jaxfleet.fluid import framework as framework
from jaxfleet.fluid import incubate as incubate
from jaxfleet.fluid import initializer as initializer
from jaxfleet.fluid import io as io
from jaxfleet.fluid import layers as layers
from jaxfleet.fluid import metrics as metrics
from jaxfleet.fluid import nets as nets
from jaxfleet.fluid import op as op
from jaxfleet.fluid import optimizer as optimizer
from jaxfleet.fluid import profiler as profiler
from jaxfleet.fluid import readers as readers
from jaxfleet.fluid import regularizer as regularizer
from jaxfleet.fluid import unique_name as unique_name
from jaxfleet.fluid.backward import append_backward as append_backward
from jaxfleet.fluid.backward import gradients as gradients
from jaxfleet.fluid.compiler import BuildStrategy as BuildStrategy
from jaxfleet.fluid.compiler import CompiledProgram as CompiledProgram
from jaxfleet.fluid.compiler import ExecutionStrategy as ExecutionStrategy
from jaxfleet.fluid.core import is_compiled_with_cuda as is_compiled_with_cuda
from jaxfleet.fluid.data_feeder import DataFeeder as DataFeeder
from jaxfleet.fluid.dataset import DatasetFactory as DatasetFactory
from jaxfleet.fluid.dataset import InMemoryDataset as InMemoryDataset
from jaxfleet.fluid.dataset import QueueDataset as QueueDataset
from jaxfleet.fluid.executor import Executor as Executor
from jaxfleet.fluid.executor import FetchHandler as FetchHandler
from jaxfleet.fluid.executor import Scope as Scope
from jaxfleet.fluid.executor import global_scope as global_scope
from jaxfleet.fluid.executor import scope_guard as scope_guard
from jaxfleet.fluid.flags import get_flags as get_flags
from jaxfleet.fluid.flags import set_flags as set_flags
from jaxfleet.fluid.framework.block import Block as Block
from jaxfleet.fluid.framework.guards import device_guard as device_guard
from jaxfleet.fluid.framework.guards import name_scope as name_scope
from jaxfleet.fluid.framework.operator import Operator as Operator
from jaxfleet.fluid.framework.program import Program as Program
from jaxfleet.fluid.framework.program import default_main_program as default_main_program
from jaxfleet.fluid.framework.program import default_startup_program as default_startup_program
from jaxfleet.fluid.framework.program import program_guard as program_guard
from jaxfleet.fluid.framework.variable import Parameter as Parameter
from jaxfleet.fluid.framework.variable import Variable as Variable
from jaxfleet.fluid.input import data as data
from jaxfleet.fluid.input import embedding as embedding
from jaxfleet.fluid.input import one_hot as one_hot
from jaxfleet.fluid.io import load as load
from jaxfleet.fluid.io import save as save
from jaxfleet.fluid.lod_tensor import LoDTensor as LoDTensor
from jaxfleet.fluid.lod_tensor import create_lod_tensor as create_lod_tensor
from jaxfleet.fluid.lod_tensor import create_random_int_lodtensor as create_random_int_lodtensor
from jaxfleet.fluid.parallel_executor import ParallelExecutor as ParallelExecutor
from jaxfleet.fluid.param_attr import ParamAttr as ParamAttr
from jaxfleet.fluid.places import CPUPlace as CPUPlace
from jaxfleet.fluid.places import CUDAPlace as CUDAPlace
from jaxfleet.fluid.places import cpu_places as cpu_places
from jaxfleet.fluid.places import cuda_places as cuda_places
from jaxfleet.fluid.transpiler import DistributeTranspiler as DistributeTranspiler
from jaxfleet.fluid.transpiler import DistributeTranspilerConfig as DistributeTranspilerConfig
from jaxfleet.fluid.transpiler import FLDistributeTranspiler as FLDistributeTranspiler
from jaxfleet.fluid.transpiler import memory_optimize as memory_optimize
from jaxfleet.fluid.transpiler import release_memory as release_memory
