"""Miniatures of public programs, in the style of their authors, reimplemented from the idea."""

from collections.abc import Callable

from tests.gallery import (
    agents,
    averages,
    curvature,
    generative,
    gradients,
    language,
    libraries,
    reinforcement,
    scales,
    science,
    vision,
)
from tests.zoo import Built
from tests.zoo.base import Wrap

KINDS: dict[str, dict[str, Callable[[Wrap], Built]]] = {
    "reinforcement": reinforcement.PROGRAMS,
    "averages": averages.PROGRAMS,
    "gradients": gradients.PROGRAMS,
    "scales": scales.PROGRAMS,
    "language": language.PROGRAMS,
    "vision": vision.PROGRAMS,
    "generative": generative.PROGRAMS,
    "science": science.PROGRAMS,
    "agents": agents.PROGRAMS,
    "curvature": curvature.PROGRAMS,
    "libraries": libraries.PROGRAMS,
}
"""What builds each program around its wrapped optimizers, by kind and name."""

GALLERY: dict[str, Callable[[Wrap], Built]] = {
    name: build for programs in KINDS.values() for name, build in programs.items()
}
"""The same by name."""

assert len(GALLERY) == sum(map(len, KINDS.values())), "gallery: a name is used twice"
