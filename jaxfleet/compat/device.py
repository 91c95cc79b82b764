"""`paddle.fluid.layers.device`, which fluid itself replaced by ParallelExecutor in 0.15."""

from typing import NoReturn

from jaxfleet.errors import ProgramError


def get_places(device_count: int | None = None, device_type: str | None = None) -> NoReturn:
    """Rejects a list of devices for `parallel_do`, which fluid 1.8 has removed."""
    del device_count, device_type
    hint = "run the program by fluid.ParallelExecutor, or CompiledProgram.with_data_parallel"
    raise ProgramError("get_places: there is no parallel_do to use the devices", hint=hint)
