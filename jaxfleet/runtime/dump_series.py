"""One dump of several pipelines that rewrite one program after another."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from jaxfleet.env import read_environment
from jaxfleet.ir import Program
from jaxfleet.pipeline import Dump, Pass, Stage, new_dump_folder, run_pipeline


class DumpSeries:
    """Instruments consecutive pipelines, and numbers their passes consecutively.

    The folder is created at the first stage.

    Args:
        root: where the folder is created, named for the program.
        source: add source lines to the diffs.
        earlier: stages of pipelines that ran before, which other dumps may begin with too.
    """

    def __init__(self, root: Path, *, source: bool = False, earlier: Iterable[Stage] = ()) -> None:
        self._root, self._source, self._earlier = root, source, tuple(earlier)
        self._dump: Dump | None = None
        self._next = 0

    def __call__(self, stage: Stage) -> None:
        """Writes a stage; the input of a later pipeline is the output of the one before."""
        if self._dump is None:
            name = stage.after.name
            self._dump = Dump(new_dump_folder(self._root, name), source=self._source)
            for one in self._earlier:
                self(one)
        if stage.pass_ is None and self._next:
            return
        self._dump(replace(stage, index=self._next))
        self._next += 1


def begin_series(earlier: Iterable[Stage] = ()) -> DumpSeries | None:
    """Returns the instrument of a new dump if the environment asks for dumps; else None."""
    environment = read_environment()
    if environment.dump_dir is None:
        return None
    return DumpSeries(environment.dump_dir, source=environment.dump_source, earlier=earlier)


def run_passes(
    program: Program, passes: Sequence[Pass], *, series: DumpSeries | None = None
) -> Program:
    """Runs passes in order, and dumps each into `series` or a new dump.

    The program is verified between passes if they are dumped.
    """
    if series is not None:
        return run_pipeline(program, passes, instruments=[series])
    for pass_ in passes:
        program = pass_.run(program)
    return program


def end_if_only_dumping() -> None:
    """Ends the process, by SystemExit, if the environment asks for dumps only."""
    if read_environment().dump_until_compiled:
        raise SystemExit(0)
