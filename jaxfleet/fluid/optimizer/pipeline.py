"""PipelineOptimizer: refused."""

from typing import Any, NoReturn

from jaxfleet.errors import UnsupportedError
from jaxfleet.ops.frames import line_of_caller


class PipelineOptimizer:
    """Would cut a program into stages on several devices.

    Raises:
        NotImplementedError: always.
    """

    def __init__(
        self,
        optimizer: Any,
        cut_list: Any = None,
        place_list: Any = None,
        concurrency_list: Any = None,
        queue_size: int = 30,
        sync_steps: int = 1,
        start_cpu_core_id: int = 0,
    ) -> NoReturn:
        del optimizer, cut_list, place_list, concurrency_list
        del queue_size, sync_steps, start_cpu_core_id
        what = "PipelineOptimizer: no mode here runs stages of one program on several devices"
        hint = "train by data (CompiledProgram.with_data_parallel); RecomputeOptimizer saves memory"
        raise UnsupportedError(what, source=line_of_caller(), hint=hint)
