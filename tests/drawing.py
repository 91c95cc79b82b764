"""Number of Hypothesis examples: 25 by default, more with the profile `nightly`."""

from hypothesis import settings


def at_most(examples: int) -> settings:
    """Returns settings with at most this many examples, or as many as the profile allows."""
    return settings(max_examples=min(examples, settings().max_examples))
