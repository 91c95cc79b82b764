"""Runs an old script unchanged: `python -m jaxfleet.compat script.py ARGS`.

`-m MODULE` runs a module. `-m paddle.distributed.launch` and `-m paddle.distributed.launch_ps`
start processes that run their script in the same way. Python processes that a script itself starts,
with `subprocess` or `multiprocessing`, find `paddle` too, as a file on `PYTHONPATH`.
"""

import atexit
import runpy
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from jaxfleet.compat.installing import install
from jaxfleet.env import prepend_python_path

_USAGE = """\
usage: python -m jaxfleet.compat (SCRIPT | -m MODULE) [ARGS...]

Runs a script that imports paddle, with jaxfleet.fluid in its place.
"""
_LAUNCHES = {
    "paddle.distributed.launch": "jaxfleet.launch.paddle_launch",
    "paddle.distributed.launch_ps": "jaxfleet.launch.paddle_launch_ps",
}
_RUNNER = ("-m", "jaxfleet.compat")
_USER_ERROR = 2
_PADDLE = """\
# Stands for paddle in a process that a script under jaxfleet.compat has started.
import sys

import jaxfleet.compat

del sys.modules["paddle"]
jaxfleet.compat.install()
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the script or module of the arguments; returns the exit status.

    A script's own exit, and its errors, pass through.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] in (["-h"], ["--help"]):
        sys.stdout.write(_USAGE)
        return 0
    is_module = words[:1] == ["-m"]
    words = words[1:] if is_module else words
    if not words:
        sys.stderr.write(_USAGE)
        return _USER_ERROR
    name, arguments = words[0], words[1:]
    install()
    _install_in_children()
    if is_module and name in _LAUNCHES:
        launch = import_module(_LAUNCHES[name])
        status: int = launch.main(arguments, runner=_RUNNER)
        return status
    if not is_module and not Path(name).exists():
        sys.stderr.write(f"error: there is no script {name}\n")
        return _USER_ERROR
    sys.argv = [name, *arguments]
    if is_module:
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(name).resolve().parent))
        runpy.run_path(name, run_name="__main__")
    return 0


def _install_in_children() -> None:
    """Makes `paddle` importable in Python processes that this one starts."""
    folder = tempfile.mkdtemp(prefix="jaxfleet-compat-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    Path(folder, "paddle.py").write_text(_PADDLE, encoding="utf-8")
    prepend_python_path(folder)


if __name__ == "__main__":
    sys.exit(main())
