"""The look of plots: colours, lines and fonts, the same in all of them.

Colours are those of Okabe and Ito, which people with any kind of colour blindness tell apart; lines
differ by their dashes too, and bars by their hatches, so that no plot needs colour. The ground is
white also where the page around a picture is dark.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxfleet.errors import StrategyError

INK, SOFT, GRID = "#1b2330", "#59636f", "#d9dde3"
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f8a96")
DASHES = ("solid", "dashed", "dotted", "dashdot")
HATCHES = ("", "////", "||||", "xxxx", "\\\\\\\\", "----", "++++")
_WIDTH = 8.0  # inches
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "semibold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "text.color": INK,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
    "savefig.dpi": 150,
    "lines.linewidth": 1.8,
    "hatch.linewidth": 0.7,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text, to be searched and read aloud
    "svg.hashsalt": "jaxfleet",  # equal plots are equal files
}


@contextmanager
def drawing(path: str | Path, title: str, *, height: float = 4.0) -> Iterator[Any]:
    """Context in which axes are drawn on; writes the picture at the end.

    Args:
        path: a file; its suffix selects the format: `.png`, `.svg`.
        title: of the plot.
        height: in inches.

    Raises:
        StrategyError: matplotlib is not installed, or does not write this format.
    """
    try:
        from matplotlib import rc_context  # noqa: PLC0415  # an extra
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        hint = 'pip install "jaxfleet[plot]"'
        raise StrategyError("plot: matplotlib is not installed", hint=hint) from error
    with rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        formats = figure.canvas.get_supported_filetypes()
        kind = Path(path).suffix.removeprefix(".").lower()
        if kind and kind not in formats:
            what = f"plot: '{path}' ends in '.{kind}', which is not a format of a picture"
            raise StrategyError(what, hint="name it .svg, .png or .pdf")
        axes = figure.subplots()
        axes.set_title(_plain(title))
        yield axes
        figure.savefig(path, metadata={"Date": None} if kind == "svg" else None)


def curve(axes: Any, x: Any, y: Any, label: str, number: int) -> None:
    """Draws steps as the line of a number: it selects the colour and the dashes."""
    style = {"color": COLORS[number % len(COLORS)], "linestyle": DASHES[number % len(DASHES)]}
    axes.step(x, y, where="post", label=_plain(label), **style)


def limit(axes: Any, y: float, label: str) -> None:
    """Draws a level that is not to be exceeded."""
    axes.axhline(y, color=INK, linestyle=DASHES[2], linewidth=1.2, label=_plain(label))


def bars(axes: Any, spans: Any, row: tuple[float, float], number: int) -> None:
    """Draws bars of (begin, length) in a row of (bottom, height), as those of a number."""
    place = number % len(COLORS)
    axes.broken_barh(spans, row, facecolor=COLORS[place], hatch=HATCHES[place], edgecolor="white",
                     linewidth=0.0)  # fmt: skip


def legend(axes: Any, labels: list[str]) -> None:
    """Draws the legend of bars by their numbers, under the plot."""
    from matplotlib.patches import Patch  # noqa: PLC0415  # an extra

    made = [
        Patch(facecolor=COLORS[n % len(COLORS)], hatch=HATCHES[n % len(HATCHES)],
              edgecolor="white", linewidth=0.0, label=_plain(label))
        for n, label in enumerate(labels)
    ]  # fmt: skip
    axes.figure.legend(handles=made, loc="outside lower left", ncols=4)


def _plain(text: str) -> str:
    """Returns text that is shown as it is: `$` would begin a formula."""
    return text.encode("utf-8", "replace").decode().replace("$", r"\$")
