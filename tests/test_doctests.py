"""The examples in jaxfleet's docstrings.

pytest's `--doctest-modules` searches every object of 1,600 modules, 6 s in each worker, although
few modules have examples.
"""

import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest

from jaxfleet import fluid

ROOT = Path(__file__).parent.parent
_EXAMPLE = re.compile(r"^\s*>>> ", re.MULTILINE)


def modules_with_examples() -> list[str]:
    """Returns the names of the modules of jaxfleet whose text contains an example."""
    folders = {"jaxfleet": "jaxfleet", "passes": "jaxfleet.passes"}  # `**` follows no link
    return [
        ".".join((package, *path.relative_to(ROOT / folder).with_suffix("").parts))
        for folder, package in folders.items()
        for path in sorted((ROOT / folder).glob("**/*.py"))
        if _EXAMPLE.search(path.read_text(encoding="utf-8"))
    ]


@pytest.mark.parametrize("name", modules_with_examples())
def test_the_examples_of_a_module_give_what_they_show(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = doctest.DocTestRunner()
    for number, test in enumerate(doctest.DocTestFinder().find(importlib.import_module(name))):
        if test.examples:
            folder = tmp_path / str(number)  # examples write files
            folder.mkdir()
            monkeypatch.chdir(folder)
            runner.run(test)
    result = runner.summarize(verbose=False)
    assert result.attempted
    assert not result.failed


# Public modules whose every class and function has an example.
WITH_EXAMPLES = [
    "jaxfleet",
    "jaxfleet.checkpoint",
    "jaxfleet.data",
    "jaxfleet.fleet",
    "jaxfleet.notebook",
    "jaxfleet.tables",
    "jaxfleet.testing",
]
# Names of `jaxfleet.fluid` at which a script begins.
OF_FLUID = [
    "CompiledProgram",
    "DataFeeder",
    "DistributeTranspiler",
    "DistributeTranspilerConfig",
    "Executor",
    "ParamAttr",
    "Program",
    "append_backward",
    "create_lod_tensor",
    "data",
    "default_main_program",
    "default_startup_program",
    "memory_optimize",
    "program_guard",
    "release_memory",
]


@pytest.mark.parametrize("name", OF_FLUID)
def test_a_name_at_which_a_fluid_script_begins_has_an_example(name: str) -> None:
    assert _EXAMPLE.search(inspect.getdoc(getattr(fluid, name)) or "")


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_every_class_and_function_of_a_public_module_has_an_example(module: str) -> None:
    home = importlib.import_module(module)
    values = {name: getattr(home, name) for name in dir(home) if not name.startswith("_")}
    texts = {
        name: inspect.getdoc(value) or ""
        for name, value in values.items()
        if (inspect.isclass(value) or inspect.isroutine(value))
        and value.__module__.startswith("jaxfleet")
    }
    assert texts
    assert [name for name, text in texts.items() if not _EXAMPLE.search(text)] == []
