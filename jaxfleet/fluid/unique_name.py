"""Unique names, as fluid makes them: `fc_0.w_0`; a counter for each key."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class UniqueNameGenerator:
    """Makes names by counting how often each key was asked for.

    Args:
        prefix: goes before every key.
    """

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._counts: Counter[str] = Counter()

    def __call__(self, key: str) -> str:
        number = self._counts[key]
        self._counts[key] += 1
        return f"{self._prefix}{key}_{number}"


class _Current:
    def __init__(self) -> None:
        self.generator = UniqueNameGenerator()


_CURRENT = _Current()


def generate(key: str) -> str:
    """Returns `key_0`, then `key_1`, ..."""
    return _CURRENT.generator(key)


def switch(new_generator: UniqueNameGenerator | None = None) -> UniqueNameGenerator:
    """Takes another generator, a new one unless given, and returns the one before."""
    old = _CURRENT.generator
    _CURRENT.generator = new_generator if new_generator is not None else UniqueNameGenerator()
    return old


@contextmanager
def guard(new_generator: UniqueNameGenerator | str | None = None) -> Iterator[None]:
    """Takes another generator within a `with`; a text is the prefix of a new one."""
    if isinstance(new_generator, str):
        new_generator = UniqueNameGenerator(new_generator)
    old = switch(new_generator)
    try:
        yield
    finally:
        switch(old)
