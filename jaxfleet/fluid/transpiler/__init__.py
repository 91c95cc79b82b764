"""Transpilers: conversion of a script's program to those of the processes of a job."""

from jaxfleet.fluid.transpiler import collective as collective
from jaxfleet.fluid.transpiler import details as details
from jaxfleet.fluid.transpiler.config import DistributedMode as DistributedMode
from jaxfleet.fluid.transpiler.config import (
    DistributeTranspilerConfig as DistributeTranspilerConfig,
)
from jaxfleet.fluid.transpiler.config import ServerRuntimeConfig as ServerRuntimeConfig
from jaxfleet.fluid.transpiler.details.program_utils import wait_server_ready as wait_server_ready
from jaxfleet.fluid.transpiler.distribute_transpiler import (
    DistributeTranspiler as DistributeTranspiler,
)
from jaxfleet.fluid.transpiler.geo_sgd_transpiler import (
    FLDistributeTranspiler as FLDistributeTranspiler,
)
from jaxfleet.fluid.transpiler.geo_sgd_transpiler import GeoSgdTranspiler as GeoSgdTranspiler
from jaxfleet.fluid.transpiler.ps_dispatcher import HashName as HashName
from jaxfleet.fluid.transpiler.ps_dispatcher import PSDispatcher as PSDispatcher
from jaxfleet.fluid.transpiler.ps_dispatcher import RoundRobin as RoundRobin
from jaxfleet.fluid.transpiler.ps_dispatcher import VarBlock as VarBlock
from jaxfleet.fluid.transpiler.ps_dispatcher import same_or_split_var as same_or_split_var
from jaxfleet.fluid.transpiler.ps_dispatcher import slice_variable as slice_variable
from jaxfleet.runtime.transpile import memory_optimize as memory_optimize
from jaxfleet.runtime.transpile import release_memory as release_memory
