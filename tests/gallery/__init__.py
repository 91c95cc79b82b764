"""Programs in the idioms of public ones, whose update is not one pass of one optimizer."""

from collections.abc import Callable

from tests.gallery import averages, gradients, reinforcement, scales
from tests.zoo import Built
from tests.zoo.base import Wrap

GALLERY: dict[str, Callable[[Wrap], Built]] = {
    **reinforcement.PROGRAMS,
    **averages.PROGRAMS,
    **gradients.PROGRAMS,
    **scales.PROGRAMS,
}
"""What builds each program around its wrapped optimizers, by name."""
