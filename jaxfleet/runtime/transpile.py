"""Transpilation: runs a pipeline on a program, recorded and dumped."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxfleet.analysis.step_checks import meaning_rules
from jaxfleet.env import read_environment
from jaxfleet.ir import Program
from jaxfleet.passes.pipelines import gloo_pipeline
from jaxfleet.pipeline import Dump, Instrument, Pass, Record, new_dump_folder, run_pipeline


def over_gloo(devices: Sequence[Any]) -> bool:
    """Whether devices are CPUs of several processes, which gloo connects."""
    processes = {device.process_index for device in devices}
    return len(processes) > 1 and all(device.platform == "cpu" for device in devices)


def summed_over(devices: Sequence[Any], *, joins: bool = True) -> tuple[Pass, ...]:
    """Returns the passes for a program's all-reduces over these devices; none except over gloo.

    `joins` allows fusing small values.
    """
    return gloo_pipeline(len(devices), joins=joins) if over_gloo(devices) else ()


def transpile(
    program: Program,
    passes: Sequence[Pass],
    *,
    dump_dir: Path | None,
    series: Instrument | None = None,
) -> tuple[Program, Record]:
    """Runs passes; returns the result with the record of every pass.

    Dumps go to `dump_dir`, by default the environment's, unless `series` takes the stages.
    """
    record = Record()
    instruments: list[Instrument] = [record]
    environment = read_environment()
    folder = dump_dir
    if series is not None:
        instruments.append(series)
    elif folder is None and environment.dump_dir is not None:
        folder = new_dump_folder(environment.dump_dir, program.name)
    if folder is not None:
        instruments.append(Dump(folder, source=environment.dump_source))
    result = run_pipeline(program, passes, instruments=instruments, rules=meaning_rules)
    return result, record
