"""Let operators run in another order, in which less is alive at once."""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from jaxfleet.analysis.memory import Curve, curve_of
from jaxfleet.ir import Program
from jaxfleet.passes._letters import sizes_of_letters
from jaxfleet.passes._list_scheduling import depth_first, from_the_back, from_the_front
from jaxfleet.passes._must_follow import MustFollow
from jaxfleet.pipeline import Pass, register_pass


@register_pass("order_for_memory")
@dataclass(frozen=True)
class OrderForMemory(Pass):
    """Orders the operators of block 0 for a lower peak of memory.

    A captured step computes all gradients and then updates, layer by layer; each gradient lies
    there until its update. Here what frees memory runs as soon as it may, so an update stands
    right behind its gradient, and what only takes memory as late as it may. Every operator
    computes what it did: what it reads, what it overwrites and what acts on the world keeps its
    order, and nothing passes a `cut`.

    Several orders are made by list scheduling, from the front and from the back, from the
    program's order and from one that makes what is needed for one result after what is needed for
    another. The one whose predicted peak is lowest is taken (`analysis.memory.curve_of`); where
    none is lower than the program's own, the program stays as it is. A compiler orders what is
    inside one executable once more: the order counts between executables (`cut_apart`).

    Before::

        program p
          data  x: f32[4]
          param v: f32[4,4]
          param w: f32[4,4]
          block 0
            forward
              h: f32[4] = jax.dot(v, x)
              y: f32[4] = jax.dot(w, h)
            backward
              w@GRAD: f32[4,4] = jax.outer(y, h) for (w, w@GRAD)
              h@GRAD: f32[4] = jax.dot(w, y)
              v@GRAD: f32[4,4] = jax.outer(h@GRAD, x) for (v, v@GRAD)
            optimize
              v = sgd(v, v@GRAD)
              w = sgd(w, w@GRAD)

    After::

        program p
          data  x: f32[4]
          param v: f32[4,4]
          param w: f32[4,4]
          block 0
            forward
              h: f32[4] = jax.dot(v, x)
              y: f32[4] = jax.dot(w, h)
            backward
              w@GRAD: f32[4,4] = jax.outer(y, h) for (w, w@GRAD)
              h@GRAD: f32[4] = jax.dot(w, y)
            optimize
              w = sgd(w, w@GRAD)
            backward
              v@GRAD: f32[4,4] = jax.outer(h@GRAD, x) for (v, v@GRAD)
            optimize
              v = sgd(v, v@GRAD)
    """

    rows: int = 256  # what a letter counts for
    keep: tuple[str, ...] = ()  # variables that are fetched by name, so returned

    def run(self, program: Program) -> Program:
        best, curve = program, self._curve(program)
        for order in _orders(program, curve, self._light(program, curve)):
            made = _ordered(program, order)
            found = self._curve(made)
            if found.peak < curve.peak:
                best, curve = made, found
        return best

    def _curve(self, program: Program, *, merges: bool = True) -> Curve:
        sizes = sizes_of_letters(program, self.rows)
        return curve_of(program, sizes, keep=self.keep, merges=merges)

    def _light(self, program: Program, curve: Curve) -> set[int]:
        """Returns the places of operators that are computed inside their readers."""
        alone = self._curve(program, merges=False).values
        both = zip(alone, curve.values, strict=True)
        return {value.made for value, merged in both if value.bytes and not merged.bytes}


def _orders(program: Program, curve: Curve, light: AbstractSet[int]) -> Iterator[Sequence[int]]:
    """Yields orders of a program's operators.

    Those that a compiler computes inside their readers hold nothing, and run right before them.
    """
    must, values = MustFollow.of(program), curve.values
    heavy, others = must.without(light), [n for n in range(len(curve.bytes)) if n not in light]
    for base in (others, depth_first(others, heavy)):
        front = from_the_front(values, base, heavy)
        back = from_the_back(values, base, heavy)
        more = from_the_back(values, front, heavy), from_the_front(values, back, heavy)
        for order in (front, back, *more):
            yield must.with_light(order, light)


def _ordered(program: Program, order: Sequence[int]) -> Program:
    ops = program.root.ops
    return program.with_block(program.root.with_ops([ops[place] for place in order]))
