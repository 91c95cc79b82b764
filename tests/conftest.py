"""Gives every test eight emulated CPU devices; compiles quickly where what is tested allows it."""

import gc
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import settings

from tests.compiling import quickly

# Read when JAX starts its backend, here and in the processes that tests start: XLA cuts a program
# to compile its parts side by side, which costs a fifth more where programs are small.
_FLAGS = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = f"--xla_cpu_parallel_codegen_split_count=1 {_FLAGS}".strip()

# Tests start hundreds of processes: where no bytecode may be written, each would spend half a
# second on compiling jaxfleet's own modules.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Tests start servers by hand, without a secret, and save below pytest's temporary folders; those
# that test what happens without these settings remove them. A launch makes a secret all the same.
os.environ.setdefault("JAXFLEET_INSECURE", "1")
os.environ.setdefault("JAXFLEET_SAVE_DIR", f"{tempfile.gettempdir()}{os.pathsep}{Path.cwd()}")

# Both must be said before JAX starts its backend, which the first array does.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.devices()  # it reads XLA_FLAGS now, and no more: some tests set them for those that they start

# .ci/run copies this folder out and runs it against an installed wheel, where alone it can pass.
collect_ignore = ["smoke"]

# A shell that starts the tests in the background, or by nohup, has them ignore these; so would all
# that the tests start, and a test that interrupts a job would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The first example of a test pays for compiling, so a deadline would find that and nothing else.
# `--hypothesis-profile=nightly` draws many more; tests scale their own numbers by the profile.
settings.register_profile("jaxfleet", deadline=None, print_blob=True, max_examples=50)
settings.register_profile("nightly", deadline=None, print_blob=True, max_examples=1000)
settings.load_profile("jaxfleet")

# In these folders tests ask what a program means, and are compiled quickly, unless they are marked
# `optimized`; what users run is compiled as it always is.
_MEANING = frozenset(
    {
        "analysis",
        "capture",
        "checkpoint",
        "cli",
        "collective",
        "compat",
        "exact",
        "faults",
        "fleet",
        "fluid",
        "gallery",
        "group",
        "ir",
        "launch",
        "lower",
        "mistakes",
        "modes",
        "one_ir",
        "ops",
        "passes",
        "pipeline",
        "ps",
        "security",
        "runtime",
        "sparse",
        "tables",
        "test_zoo.py",
        "watch",
    }
)


@pytest.fixture(autouse=True)
def _warnings_of_arguments_come_again() -> None:
    """Lets each test see the warnings that a process is given once."""
    if no_effect := sys.modules.get("jaxfleet.fluid.no_effect"):
        no_effect.forget_warnings()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts files first that take long, so that no worker is left alone with one of them.

    A test that starts processes takes as long as some twenty others.
    """
    weights: Counter[Path] = Counter()
    for item in items:
        weights[item.path] += 20 if item.get_closest_marker("processes") else 1
    items.sort(key=lambda item: -weights[item.path])


def pytest_collection_finish() -> None:
    """Collects garbage less often, and never what was imported: 8 % of the time went there."""
    _put_aside()
    gc.set_threshold(50_000, 20, 20)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Compiles quickly what a test runs, and its fixtures, where it asks for a meaning."""
    with quickly() if _asks_for_meaning(item) else nullcontext():
        result = yield
    # JAX keeps what it has compiled. Were it looked through again and again, each `gc.collect()`
    # of a test would take some seconds after a thousand tests.
    if nextitem is not None and nextitem.path != item.path and gc.get_count()[2]:
        _put_aside()
    return result


def _put_aside() -> None:
    """Has the garbage collector look no more at what is there now."""
    gc.collect()
    gc.freeze()


def _asks_for_meaning(item: pytest.Item) -> bool:
    here = Path(__file__).parent
    if item.get_closest_marker("optimized") or not item.path.is_relative_to(here):
        return False
    return item.path.relative_to(here).parts[0] in _MEANING


@pytest.fixture(autouse=True)
def _draws_the_same(request: pytest.FixtureRequest) -> None:
    """Begins a module's `RANDOM` anew, so that no test's numbers depend on those before it."""
    random = getattr(request.module, "RANDOM", None)
    if isinstance(random, np.random.Generator):
        random.bit_generator.state = np.random.default_rng(0).bit_generator.state
