"""Files can be opened for a checkpoint although connections use all other descriptors."""

import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from jaxfleet.ps.server.event_loop import DescriptorReserve, raise_descriptor_limit


@contextmanager
def few_descriptors(more: int) -> Iterator[None]:
    """Limits this process to `more` additional files, during the block."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(one.name) for one in Path("/dev/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def take_all(stack: ExitStack) -> int:
    """Opens files until no descriptor is left; returns their number."""
    for count in range(100_000):
        try:
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        except OSError:
            return count
    raise AssertionError("there is no limit")


def test_what_is_in_reserve_is_free_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    with few_descriptors(40), ExitStack() as stack:
        reserve = DescriptorReserve(16)
        stack.callback(reserve.close)
        assert take_all(stack) > 0
        with pytest.raises(OSError, match="Too many open files"):
            (tmp_path / "before").open("w")
        with reserve.lent(), ExitStack() as files:
            for at in range(16):
                files.enter_context((tmp_path / str(at)).open("w"))
        with pytest.raises(OSError, match="Too many open files"):
            (tmp_path / "after").open("w")


def test_a_reserve_that_is_lent_twice_is_whole_again_after_both() -> None:
    with few_descriptors(40), ExitStack() as stack:
        reserve = DescriptorReserve(8)
        stack.callback(reserve.close)
        with reserve.lent():
            with reserve.lent():
                pass
            with ExitStack() as inner:
                free = take_all(inner)
        with ExitStack() as inner:
            assert take_all(inner) == free - 8


def test_the_limit_is_raised_to_what_the_user_may_have() -> None:
    with few_descriptors(40):
        raise_descriptor_limit()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft == (1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16))
