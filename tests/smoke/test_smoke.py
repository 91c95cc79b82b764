"""Run by .ci/run against an installed wheel, outside of the checkout."""

import importlib
import pkgutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import jaxfleet
import jaxfleet.passes
from jaxfleet.ir import parse
from jaxfleet.pipeline import registered_passes

PROGRAM = """\
program tiny
  data  x: f32[b,4]
  param w: f32[4,2]
  block 0
    forward
      h: f32[b,2] = fc(x, w) {act="relu"}
"""


def jaxfleet_command() -> Path:
    """Returns the console script of the environment that runs the tests."""
    return Path(sysconfig.get_path("scripts")) / "jaxfleet"


def test_the_package_is_the_installed_one() -> None:
    site_packages = Path(sysconfig.get_path("purelib"))
    assert Path(jaxfleet.__file__).is_relative_to(site_packages)


def test_the_marker_of_a_typed_package_is_shipped() -> None:
    assert (Path(jaxfleet.__file__).parent / "py.typed").is_file()


@pytest.mark.parametrize("name", [m.name for m in pkgutil.walk_packages(jaxfleet.__path__)])
def test_every_package_can_be_imported(name: str) -> None:
    importlib.import_module(f"jaxfleet.{name}")


def test_every_shipped_pass_is_registered() -> None:
    assert {"grad_allreduce", "fuse_allreduce"} <= set(registered_passes())
    shipped = {m.name for m in pkgutil.walk_packages(jaxfleet.passes.__path__, "jaxfleet.passes.")}
    assert shipped <= set(sys.modules)


def test_a_program_survives_printing_and_parsing() -> None:
    program = parse(PROGRAM)
    assert parse(str(program)) == program


def test_the_command_shows_its_help() -> None:
    done = subprocess.run(
        [jaxfleet_command(), "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    assert "opt" in done.stdout
