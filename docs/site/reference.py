"""The reference pages, written from the code at every build of the site.

mkdocstrings fills in each `::: name` from the docstring. What has no docstring of its own, such as
the options of a command, comes from the registry or the parser that the program itself uses.
"""

import argparse
import functools
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from functools import cache
from types import ModuleType

from jaxfleet.cli.app import COMMANDS, make_parser
from jaxfleet.env.meanings import MEANINGS
from jaxfleet.ops import known_ops
from jaxfleet.pipeline import Pass, options_of, registered_passes
from jaxfleet.ps.server.metrics import exported

_MODULES = {
    "jaxfleet": "The names of `import jaxfleet as jf`.",
    "jaxfleet.fleet": "`jf.fleet`: one interface for a script that runs as any process of a job.",
    "jaxfleet.tables": "`jf.tables`: optimizers, initial rows and entry rules of embedding tables.",
    "jaxfleet.data": "`jf.data`: batches in an order that a restarted job goes on with.",
    "jaxfleet.errors": "Every exception that jaxfleet raises.",
    "jaxfleet.testing": "Help for tests of passes.",
    "jaxfleet.pipeline": "Passes, their options, and pipelines as text.",
    "jaxfleet.ir": "Programs and their text.",
    "jaxfleet.checkpoint": "Checkpoints of a state.",
    "jaxfleet.checkpoint.tables": "Checkpoints of embedding tables.",
}


@cache
def pages() -> dict[str, str]:
    """Returns the text of every page by its file's name, in the order of the navigation."""
    modules = {f"{name}.md": _module_page(name, about) for name, about in _MODULES.items()}
    return {
        **modules,
        "command-line.md": _command_line(),
        "environment.md": _environment(),
        "metrics.md": _metrics(),
        "passes.md": _passes(),
        "operators.md": _operators(),
    }


def public_names(name: str) -> list[str]:
    """Returns the public names of a module that are classes or functions, in alphabetical order."""
    module = importlib.import_module(name)
    names = {n for n in dir(module) if not n.startswith("_")}
    return sorted((n for n in names if _is_documented(module, n)), key=str.lower)


def _is_documented(module: ModuleType, name: str) -> bool:
    value = getattr(module, name)
    is_ours = str(getattr(value, "__module__", "")).startswith("jaxfleet")
    return is_ours and (inspect.isclass(value) or inspect.isroutine(value))


def _module_page(name: str, about: str) -> str:
    module = importlib.import_module(name)
    parts = [f"# {name}\n\n{about}\n"]
    for public in public_names(name):
        value = getattr(module, public)
        home = f"{value.__module__}.{value.__qualname__}"
        parts.append(f"::: {home}\n    options:\n      heading: {name}.{public}\n")
    return "\n".join(parts)


def _command_line() -> str:
    parts = ["# Command line\n\n`jaxfleet COMMAND --help` prints the same.\n"]
    for name in COMMANDS:
        parser = _parser_of(name)
        parser.formatter_class = functools.partial(argparse.HelpFormatter, width=90)
        usage = parser.format_usage().removeprefix("usage: ")
        parts.append(f"## jaxfleet {name}\n\n{parser.description}\n\n```text\n{usage}```\n")
        parts.append(_table(("argument", "default", "effect"), _arguments(parser)))
        if parser.epilog:
            parts.append(f"```text\n{parser.epilog.rstrip()}\n```\n")
    return "\n".join(parts)


def _parser_of(command: str) -> argparse.ArgumentParser:
    [commands] = [
        action
        for action in make_parser([command])._actions  # noqa: SLF001  # argparse has no other way
        if isinstance(action, argparse._SubParsersAction)  # noqa: SLF001
    ]
    found: argparse.ArgumentParser = commands.choices[command]
    return found


def _arguments(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str, str]]:
    formatter = argparse.HelpFormatter("")
    for action in parser._actions:  # noqa: SLF001
        if action.help == argparse.SUPPRESS:
            continue
        shown = formatter._format_action_invocation(action)  # noqa: SLF001
        is_plain = isinstance(action.default, str | int | float) and action.default is not False
        default = f"`{action.default}`" if is_plain and action.default != argparse.SUPPRESS else ""
        text = formatter._expand_help(action) if action.help else ""  # noqa: SLF001
        yield f"`{shown}`", default, _plain(text)


def _environment() -> str:
    rows = [(f"`{name}`", meaning) for name, meaning in MEANINGS.items()]
    return "\n".join(
        [
            "# Environment variables\n",
            "`jaxfleet.env` is the only package that reads the environment. `jaxfleet launch` sets",
            "the variables of a job for every process that it starts.\n",
            _table(("variable", "meaning"), rows),
        ]
    )


def _metrics() -> str:
    rows = [(f"`{m.name}`", m.kind, m.label or "", _plain(m.text)) for m in exported()]
    return "\n".join(
        [
            "# Metrics\n",
            "With `JAXFLEET_METRICS_PORT`, each parameter server serves these to Prometheus; see",
            "[watching](../watching.md).\n",
            _table(("metric", "type", "label", "meaning"), rows),
        ]
    )


def _passes() -> str:
    about = "[Passes](../passes.md) sorts them by purpose. A test runs every program below."
    parts = [f"# Passes, one by one\n\n{about}\n"]
    for name, cls in sorted(registered_passes().items()):
        parts.append(f"## {name}\n\n{_described(inspect.getdoc(cls) or '')}\n")
        options = [(f"`{o}`", _comment(cls, o.name)) for o in options_of(cls)]
        if options:
            parts.append(_table(("option", "meaning"), options))
        if cls.runs_after:
            parts.append("Runs after " + ", ".join(f"`{x}`" for x in cls.runs_after) + ".\n")
    return "\n".join(parts)


def _described(text: str) -> str:
    """Returns a pass's docstring, with its programs and examples as blocks."""
    about, _, examples = text.partition("\nExamples:\n")
    shown = [
        f"```pycon\n{part}\n```" if part.startswith(">>> ") else part
        for part in textwrap.dedent(examples).strip().split("\n\n")
    ]
    return "\n\n".join([literal_blocks(about), *shown])


def _comment(cls: type[Pass], name: str) -> str:
    """Returns the comment behind an option's field, or the docstring's line about it."""
    documented = re.search(
        rf"^ +{name}: ((?:.+\n?)(?:      +.+\n?)*)", cls.__doc__ or "", re.MULTILINE
    )
    if documented:
        return _plain(documented[1])
    found = re.search(rf"^    {name}: [^#\n]*#\s*(.*)$", inspect.getsource(cls), re.MULTILINE)
    return _plain(found[1]) if found else ""


def _operators() -> str:
    about = "`jax.NAME` is any primitive of JAX, with the parameters that JAX gives it."
    parts = [f"# Operators\n\nOperator types of the IR. {about}\n"]
    by_module: dict[str, list[tuple[str, str, str]]] = {}
    for name, found in sorted(known_ops().items()):
        if name.startswith("jax."):
            continue
        traits = found.traits
        flags = [*(["effect"] * traits.has_effect), *(["collective"] * traits.is_collective)]
        summary = (inspect.getdoc(found.meaning) or "").split("\n\n")[0]
        module = inspect.getmodule(found.meaning)
        home = module.__name__ if module else "jaxfleet.ops"
        by_module.setdefault(home, []).append((f"`{name}`", ", ".join(flags), _plain(summary)))
    for home, rows in sorted(by_module.items()):
        about = (importlib.import_module(home).__doc__ or "").split("\n\n")[0]
        parts.append(f"## {home}\n\n{_plain(about)}\n")
        parts.append(_table(("operator", "traits", "meaning"), rows))
    return "\n".join(parts)


def literal_blocks(text: str) -> str:
    """Turns the literal blocks behind `::` into fenced ones."""
    lines, out, block = text.split("\n"), list[str](), list[str]()
    opened = False
    for line in [*lines, "end"]:
        if opened and (line.startswith("    ") or not line.strip()):
            block.append(line[4:])
            continue
        if opened and block:
            body = "\n".join(block).strip("\n")
            out += ["", "```text", body, "```", ""]
        opened, block = line.endswith("::"), []
        out.append(line[:-1] if opened else line)
    return "\n".join(out[:-1])


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _plain(text: str) -> str:
    """Returns a text of one line that a cell of a table holds."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
