"""How many examples Hypothesis draws: about 50 by default, more with its profile `nightly`."""

from hypothesis import settings


def at_most(examples: int) -> settings:
    """Returns settings with so many examples, or as many as the profile allows."""
    return settings(max_examples=min(examples, settings().max_examples))
