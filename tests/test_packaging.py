"""pyproject.toml, the checkout and README.md agree about the package."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LINK = ROOT / "jaxfleet" / "passes"
README_COMMANDS = ("main", "test")


def packages_under(folder: str, *, named: str) -> set[str]:
    """Returns the packages below a folder; `**` follows no link, so jaxfleet/passes is not one.

    Args:
        folder: a folder of the checkout.
        named: the folder's package.
    """
    inits = (ROOT / folder).glob("**/__init__.py")
    below = (init.parent.relative_to(ROOT / folder) for init in inits)
    return {".".join((named, *path.parts)) for path in below}


def requirements(extra: str) -> list[str]:
    found: list[str] = PYPROJECT["project"]["optional-dependencies"][extra]
    return found


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
    )


def readme_blocks(name: str) -> list[str]:
    """Returns every bash block right under the marker, parsed independently of .ci."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    marker = re.escape(f"<!-- command: {name} -->")
    return re.findall(rf"^{marker}\n+```bash\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def test_every_package_of_the_checkout_is_shipped() -> None:
    tree = packages_under("jaxfleet", named="jaxfleet") - {"jaxfleet.passes"}
    tree |= packages_under("passes", named="jaxfleet.passes")
    listed = PYPROJECT["tool"]["setuptools"]["packages"]
    assert sorted(tree) == listed


def test_an_editable_install_is_a_path_that_static_tools_can_follow() -> None:
    # setuptools writes a .pth file only for this root; for a map of folders it installs an import
    # hook, through which Pyright and editors find no names of the package.
    assert PYPROJECT["tool"]["setuptools"]["package-dir"] == {"": "."}
    packages = PYPROJECT["tool"]["setuptools"]["packages"]
    without_init = [
        p for p in packages if not (ROOT / p.replace(".", "/") / "__init__.py").exists()
    ]
    assert without_init == []


def test_the_link_to_the_passes_is_relative() -> None:
    if not LINK.is_symlink():
        pytest.skip("this checkout was made without links")
    assert LINK.readlink() == Path("../passes")


def test_the_link_to_the_passes_is_committed_as_a_link() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is not a git checkout")
    listed = run("git", "ls-files", "--stage", "--", "jaxfleet/passes")
    assert listed.stdout.startswith("120000 "), listed
    assert run("git", "show", ":jaxfleet/passes").stdout == "../passes"


@pytest.mark.parametrize("extra", ["bench", "dev", "examples", "mpi", "plot", "test", "watch"])
def test_an_extra_gives_every_requirement_a_bound(extra: str) -> None:
    bounded = re.compile(r"jaxfleet\[\w+\]|[\w.-]+(==[\d.]+|>=[\d.]+,<[\d.]+)")
    assert [r for r in requirements(extra) if not bounded.fullmatch(r)] == []


def test_a_core_dependency_has_both_bounds() -> None:
    bounded = re.compile(r"[\w.-]+>=[\d.]+,<[\d.]+")
    assert [r for r in PYPROJECT["project"]["dependencies"] if not bounded.fullmatch(r)] == []


def test_the_tests_can_run_the_examples() -> None:
    assert "jaxfleet[examples]" in requirements("test")
    assert "jaxfleet[test]" in requirements("dev")


@pytest.mark.parametrize("name", README_COMMANDS)
def test_ci_runs_what_the_readme_tells_a_user_to_type(name: str) -> None:
    extracted = run("bash", ".ci/readme-command", name)
    assert [extracted.stdout] == readme_blocks(name), extracted.stderr


def test_a_command_that_the_readme_lacks_is_named() -> None:
    extracted = run("bash", ".ci/readme-command", "dance")
    assert extracted.returncode != 0
    assert "<!-- command: dance -->" in extracted.stderr
