"""Gives every test eight emulated CPU devices, and fast compilation in folders that allow it."""

import gc
import os
import signal
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import count
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import settings

from tests.compiling import forget_compiled, quickly

# Read when JAX starts its backend, here and in child processes: XLA splits a program to compile its
# parts in parallel, which costs a fifth more for small programs.
_FLAGS = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = f"--xla_cpu_parallel_codegen_split_count=1 {_FLAGS}".strip()

# Tests start hundreds of processes: without a bytecode cache each would spend half a second
# compiling jaxfleet's own modules.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Tests start servers by hand, without a secret, and save below pytest's temporary folders; those
# that test these settings remove them. A launch makes a secret anyway.
os.environ.setdefault("JAXFLEET_INSECURE", "1")
os.environ.setdefault("JAXFLEET_SAVE_DIR", f"{tempfile.gettempdir()}{os.pathsep}{Path.cwd()}")

# Both must be set before JAX starts its backend, at the first array.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.devices()  # reads XLA_FLAGS now: some tests later set them for children

# .ci/run copies this folder and runs it against an installed wheel; elsewhere it cannot pass.
collect_ignore = ["smoke"]

# A shell that starts the tests in the background, or by nohup, makes them ignore these signals, and
# child processes would too: a test that interrupts a job would wait forever.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The first example of a test pays for compilation, so a deadline would only find that.
# `--hypothesis-profile=nightly` draws many more; tests scale their own numbers by the profile.
settings.register_profile("jaxfleet", deadline=None, print_blob=True, max_examples=25)
settings.register_profile("nightly", deadline=None, print_blob=True, max_examples=1000)
settings.load_profile("jaxfleet")

# Tests in these folders check the meaning of programs and compile quickly, unless they are marked
# `optimized`; elsewhere compilation is as users have it.
_MEANING = frozenset(
    {
        "analysis",
        "capture",
        "checkpoint",
        "cli",
        "cluster",
        "collective",
        "compat",
        "contrib",
        "exact",
        "faults",
        "fleet",
        "fluid",
        "gallery",
        "ir",
        "launch",
        "lower",
        "mistakes",
        "modes",
        "observability",
        "one_ir",
        "ops",
        "passes",
        "pipeline",
        "ps",
        "runtime",
        "security",
        "sparse",
        "tables",
        "test_compiling.py",
        "test_zoo.py",
        "transport",
    }
)

# Every executable uses some memory mappings. Linux grants a process 65,530 (vm.max_map_count), and
# at the next XLA crashes with a segmentation fault: a grid worker reached that under JAX 0.12.
_MOST_MAPPINGS = 30_000
_WAS_OPTIMIZED = pytest.StashKey[bool]()
_FINISHED = count(1)


@pytest.fixture(autouse=True)
def _warnings_of_arguments_come_again() -> None:
    """Resets warnings that appear once per process, so that each test sees them."""
    if no_effect := sys.modules.get("jaxfleet.fluid.argument_checks"):
        no_effect.forget_warnings()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Divides cases between the tiers before `-m` selects, then puts slow files first.

    So no worker is left alone with a slow file. A test that starts processes, or has a deadline of
    its own, takes as long as some twenty others. Within a file, optimized tests come last.
    """
    _mark_all_but_few(items)
    yield
    weights: Counter[Path] = Counter()
    for item in items:
        is_slow = item.get_closest_marker("processes") or item.get_closest_marker("timeout")
        weights[item.path] += 20 if is_slow else 1
    places = {path: place for place, path in enumerate(weights)}
    items.sort(key=lambda item: (-weights[item.path], places[item.path], _is_optimized(item)))


def _mark_all_but_few(items: list[pytest.Item]) -> None:
    """Marks `grid` all but n cases of a test marked `few(n)`, those in the middle of n parts.

    The first case is often the simplest: one device, no turn of a loop.
    """
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("grid"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_test in cases.values():
        mark = of_test[0].get_closest_marker("few")
        assert mark is not None
        kept = {(2 * n + 1) * len(of_test) // (2 * mark.args[0]) for n in range(mark.args[0])}
        for n, item in enumerate(of_test):
            if n not in kept:
                item.add_marker("grid")


def pytest_collection_finish() -> None:
    """Collects garbage less often, and never imported modules: it took 8 % of the time."""
    _put_aside()
    gc.set_threshold(50_000, 20, 20)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Compiles a test and its fixtures quickly if it checks a program's meaning."""
    is_optimized = _is_optimized(item)
    if item.session.stash.get(_WAS_OPTIMIZED, is_optimized) is not is_optimized:
        jax.clear_caches()  # jit would run what it compiled of the same function the other way
    item.session.stash[_WAS_OPTIMIZED] = is_optimized
    with quickly() if _asks_for_meaning(item) else nullcontext():
        result = yield
    # JAX caches executables. Scanning them at each `gc.collect()` of a test would cost seconds
    # after a thousand tests.
    if nextitem is not None and nextitem.path != item.path and gc.get_count()[2]:
        _put_aside()
    if next(_FINISHED) % 25 == 0 and _count_mappings() > _MOST_MAPPINGS:
        _release_executables()
    return result


def _count_mappings() -> int:
    maps = Path("/proc/self/maps")  # Linux only
    return maps.read_bytes().count(b"\n") if maps.exists() else 0


def _release_executables() -> None:
    gc.unfreeze()
    forget_compiled()
    jax.clear_caches()
    _put_aside()


def _put_aside() -> None:
    """Exempts all current objects from garbage collection."""
    gc.collect()
    gc.freeze()


def _is_optimized(item: pytest.Item) -> bool:
    return item.get_closest_marker("optimized") is not None


def _asks_for_meaning(item: pytest.Item) -> bool:
    here = Path(__file__).parent
    if _is_optimized(item) or not item.path.is_relative_to(here):
        return False
    return item.path.relative_to(here).parts[0] in _MEANING


@pytest.fixture(autouse=True)
def _draws_the_same(request: pytest.FixtureRequest) -> None:
    """Reseeds a module's `RANDOM`, so that no test depends on those before it."""
    random = getattr(request.module, "RANDOM", None)
    if isinstance(random, np.random.Generator):
        random.bit_generator.state = np.random.default_rng(0).bit_generator.state
