"""Unique names in fluid's form, with a counter for each key: `fc_0.w_0`."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class UniqueNameGenerator:
    """Generates names by counting the requests for each key, which `prefix` begins."""

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
    """Sets the generator, by default to a new one, and returns the previous one."""
    old = _CURRENT.generator
    _CURRENT.generator = new_generator if new_generator is not None else UniqueNameGenerator()
    return old


@contextmanager
def guard(new_generator: UniqueNameGenerator | str | None = None) -> Iterator[None]:
    """Replaces the generator within a `with` block; a string is the prefix of a new one."""
    if isinstance(new_generator, str):
        new_generator = UniqueNameGenerator(new_generator)
    old = switch(new_generator)
    try:
        yield
    finally:
        switch(old)
