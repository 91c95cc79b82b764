"""Files of samples that tests read."""

from collections.abc import Iterable, Sequence
from pathlib import Path

Values = Sequence[float]


def line(*slots: Values) -> str:
    """Returns a sample as MultiSlot text."""
    return " ".join(f"{len(values)} {' '.join(map(str, values))}" for values in slots)


def written(path: Path, samples: Iterable[Sequence[Values]]) -> str:
    """Writes a file, and returns its path as scripts spell it."""
    path.write_text("".join(f"{line(*sample)}\n" for sample in samples), encoding="utf-8")
    return str(path)
