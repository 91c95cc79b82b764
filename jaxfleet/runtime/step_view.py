"""Reports of steps: decisions and facts beside their passes, for `view` and for dumps."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from jaxfleet.capture import Captured
from jaxfleet.ir import Program
from jaxfleet.pipeline import Record, write_facts
from jaxfleet.report import History, build_report, of_program, of_record, write_report
from jaxfleet.runtime.memory_fit import Fit
from jaxfleet.strategy import DistributedStrategy


def step_history(
    captured: Captured,
    strategy: DistributedStrategy,
    dumps: Record,
    explained: str,
    *,
    fit: Fit | None = None,
    label: str = "",
) -> History:
    """Returns the history of a step that is in this process."""
    return History(
        label,
        of_record(dumps),
        decisions=explained.splitlines(),
        notes=captured.notes,
        facts=_facts(captured, strategy),
        rows=captured.signature.rows,
        fetched=captured.metrics,
        budget_bytes=None if fit is None else int(fit.budget),
        fitted_by=fit.passes[0].name if fit is not None and fit.passes else "",
    )


def add_to_dump(folder: Path, history: History) -> None:
    """Writes beside a dump what its step decided, so that `jaxfleet view` of it shows that too."""
    facts: dict[str, Any] = {
        "decisions": list(history.decisions),
        "notes": list(history.notes),
        "facts": list(history.facts),
        "rows": history.rows,
        "fetched": list(history.fetched),
        "budget_bytes": history.budget_bytes,
        "fitted_by": history.fitted_by,
        "passes": [stage.options for stage in history.stages[1:]],
        "measured": None if history.measured is None else asdict(history.measured),
        "xla_bytes": history.xla_bytes,
        "xla_bytes_before": history.xla_bytes_before,
    }
    write_facts(folder, facts)


def write_view(
    path: str | Path, histories: Iterable[History], beside: Sequence[Program] = ()
) -> Path:
    """Writes the report of a step, and of programs that other processes run; returns its path."""
    programs = [*histories, *map(of_program, beside)]
    target = Path(path)
    write_report(build_report(programs), target)
    return target


def _facts(captured: Captured, strategy: DistributedStrategy) -> list[tuple[str, str]]:
    rows = captured.signature.rows
    size = "any size" if captured.rows is None else f"{captured.rows} rows alone"
    found = [("captured for", f"{size}, from an example of {rows} rows")]
    default = type(strategy)()
    for field in fields(strategy):
        value = getattr(strategy, field.name)
        if field.name == "mode" or value != getattr(default, field.name):
            found.append((f"strategy.{field.name}", str(value)))
    return found
