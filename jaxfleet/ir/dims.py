"""Symbolic sizes, such as a batch given by a letter, and their text.

A size is an `int` or a `Dim`, a polynomial over letters with integer coefficients whose atoms may
also be `floordiv(x, y)`, `mod(x, y)`, `max(x, y)` and `min(x, y)`. It is kept in one canonical
order, so that equal sizes compare and print alike: `2*b+1`, `n*b`, `floordiv(b,4)`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from jaxfleet.errors import JaxfleetError, ProgramError, TextError
from jaxfleet.ir.lexer import Line

LETTER = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")
CALLS: Mapping[str, Callable[[int, int], int]] = {
    "floordiv": lambda x, y: x // y,
    "mod": lambda x, y: x % y,
    "max": max,
    "min": min,
}


@dataclass(frozen=True, slots=True)
class Call:
    """An application of one of `CALLS` to two sizes."""

    name: str
    args: tuple["Size", "Size"]

    def __str__(self) -> str:
        return f"{self.name}({self.args[0]},{self.args[1]})"


Atom: TypeAlias = str | Call
Factors: TypeAlias = tuple[tuple[Atom, int], ...]  # (atom, power), sorted by the atom's text


@dataclass(frozen=True, slots=True)
class Dim:
    """A size that depends on letters; made by `letter`, arithmetic, `call`, or `parse_size`."""

    terms: tuple[tuple[Factors, int], ...]  # (factors, coefficient), highest degree first

    def __add__(self, other: "Size") -> "Size":
        sums = dict(self.terms)
        for factors, coefficient in _terms(other):
            sums[factors] = sums.get(factors, 0) + coefficient
        return _canonical(sums)

    def __mul__(self, other: "Size") -> "Size":
        sums: dict[Factors, int] = {}
        for left, x in self.terms:
            for right, y in _terms(other):
                product = _multiply(left, right)
                sums[product] = sums.get(product, 0) + x * y
        return _canonical(sums)

    def __neg__(self) -> "Size":
        return self * -1

    def __sub__(self, other: "Size") -> "Size":
        return self + other * -1

    __radd__ = __add__
    __rmul__ = __mul__

    def __rsub__(self, other: int) -> "Size":
        return -self + other

    @property
    def letters(self) -> frozenset[str]:
        found: set[str] = set()
        for factors, _ in self.terms:
            for atom, _ in factors:
                found |= {atom} if isinstance(atom, str) else letters(atom.args)
        return frozenset(found)

    def substitute(self, values: Mapping[str, "Size"]) -> "Size":
        """Returns this size with letters replaced by sizes."""
        total: Size = 0
        for factors, coefficient in self.terms:
            product: Size = coefficient
            for atom, power in factors:
                for _ in range(power):
                    product = product * _substitute_atom(atom, values)
            total = total + product
        return total

    def __str__(self) -> str:
        text = ""
        for factors, coefficient in self.terms:
            sign = "-" if coefficient < 0 else "+" if text else ""
            text += sign + _term_text(factors, abs(coefficient))
        return text

    def __repr__(self) -> str:
        return f"Dim({self})"


Size: TypeAlias = int | Dim


def letter(name: str) -> Dim:
    """Returns the size that is just this letter; the name may be any Python identifier.

    Raises:
        ProgramError: `parse_size` would not read the name back.
    """
    if LETTER.fullmatch(name) is None:
        raise ProgramError(f"'{name}' cannot name a size", hint="use a letter such as b")
    return Dim(((((name, 1),), 1),))


def call(name: str, x: Size, y: Size) -> Size:
    """Returns `name(x, y)`, one of `CALLS`, simplified where that holds for all values of letters.

    A letter is assumed to be positive, so `floordiv(b,b)` is 1.
    """
    if isinstance(x, int) and isinstance(y, int):
        return CALLS[name](x, y)
    if name in {"max", "min"}:
        if x == y:
            return x
    elif (exact := divide_exactly(x, y)) is not None:
        return exact if name == "floordiv" else 0
    return Dim(((((Call(name, (x, y)), 1),), 1),))


def divide_exactly(x: Size, y: Size) -> Size | None:
    """Returns `x / y` if it divides exactly for all values of letters, else None."""
    if y == 0:
        return None
    if x == y:
        return 1
    if x == 0:
        return 0
    if isinstance(y, int):
        if any(coefficient % y for _, coefficient in _terms(x)):
            return None
        return _canonical({factors: coefficient // y for factors, coefficient in _terms(x)})
    if len(y.terms) != 1:
        return None
    (divisor, scale) = y.terms[0]
    quotient: dict[Factors, int] = {}
    for factors, coefficient in _terms(x):
        rest = _cancel(factors, divisor)
        if rest is None or coefficient % scale:
            return None
        quotient[rest] = coefficient // scale
    return _canonical(quotient)


def letters(sizes: tuple[Size, ...]) -> frozenset[str]:
    """Returns the letters of any of the sizes."""
    return frozenset().union(*(size.letters for size in sizes if isinstance(size, Dim)))


def substitute(size: Size, values: Mapping[str, Size]) -> Size:
    """Returns the size with letters replaced by sizes."""
    return size.substitute(values) if isinstance(size, Dim) else size


def evaluate(size: Size, values: Mapping[str, int]) -> int:
    """Returns the number that a size evaluates to, given its letters.

    Raises:
        KeyError: a letter has no value.
    """
    if isinstance(size, int):
        return size
    missing = sorted(size.letters - values.keys())
    if missing:
        raise KeyError(f"size {size}: no value for {', '.join(missing)}")
    result = size.substitute(values)
    assert isinstance(result, int)
    return result


def _terms(size: Size) -> tuple[tuple[Factors, int], ...]:
    return size.terms if isinstance(size, Dim) else (((), size),)


def _canonical(sums: Mapping[Factors, int]) -> Size:
    terms = [(factors, coefficient) for factors, coefficient in sums.items() if coefficient]
    if not terms:
        return 0
    if len(terms) == 1 and not terms[0][0]:
        return terms[0][1]
    terms.sort(key=lambda term: (-sum(power for _, power in term[0]), _term_text(term[0], 1)))
    return Dim(tuple(terms))


def _multiply(left: Factors, right: Factors) -> Factors:
    powers = dict(left)
    for atom, power in right:
        powers[atom] = powers.get(atom, 0) + power
    return tuple(sorted(powers.items(), key=lambda item: str(item[0])))


def _cancel(factors: Factors, divisor: Factors) -> Factors | None:
    powers = dict(factors)
    for atom, power in divisor:
        if powers.get(atom, 0) < power:
            return None
        powers[atom] -= power
    return tuple((atom, power) for atom, power in powers.items() if power)


def _substitute_atom(atom: Atom, values: Mapping[str, Size]) -> Size:
    if isinstance(atom, str):
        return values.get(atom, letter(atom))
    x, y = (substitute(arg, values) for arg in atom.args)
    return call(atom.name, x, y)


def _term_text(factors: Factors, coefficient: int) -> str:
    parts = [str(atom) if power == 1 else f"{atom}^{power}" for atom, power in factors]
    if coefficient != 1 or not parts:
        parts.insert(0, str(coefficient))
    return "*".join(parts)


_MAX_POWER = 64  # far beyond any shape; b^999999999 would only waste time


def parse_size(text: str) -> Size:
    """Reads a size; spaces do not matter, and `b^2` is a power.

    Raises:
        TextError: the text is not a size.
    """
    return _SizeParser(text).parse()


class _SizeParser(Line):
    """Reads `sum := product (('+'|'-') product)*` by recursive descent."""

    words = re.compile(r"[0-9]+|[A-Za-z_]\w*|\S")
    has_comments = False

    def parse(self) -> Size:
        self.check_nesting()
        try:
            size = self._sum()
        except ZeroDivisionError:
            raise TextError(f"'{self.text}' divides by zero") from None
        self.end()
        return size

    def _sum(self) -> Size:
        total = -self._product() if self.take("-") else self._product()
        while True:
            if self.take("+"):
                total = total + self._product()
            elif self.take("-"):
                total = total - self._product()
            else:
                return total

    def _product(self) -> Size:
        product = self._power()
        while self.take("*"):
            product = product * self._power()
        return product

    def _power(self) -> Size:
        base = self._atom()
        if not self.take("^"):
            return base
        power = self.integer()
        if not 0 <= power <= _MAX_POWER:
            raise self.expected("a power up to 64")
        result: Size = 1
        for _ in range(power):
            result = result * base
        return result

    def _atom(self) -> Size:
        token = self.next()
        if token.isdecimal():
            return int(token)
        if token == "(":
            size = self._sum()
            self.expect(")")
            return size
        if LETTER.fullmatch(token) is None:
            raise self.expected("a size")
        if not self.take("("):
            return letter(token)
        if token not in CALLS:
            raise self.expected("a size")
        x = self._sum()
        self.expect(",")
        y = self._sum()
        self.expect(")")
        return call(token, x, y)

    def expected(self, what: str, *, hint: str | None = None) -> JaxfleetError:
        del what, hint
        hint = "sizes read like 784, b, 2*b+1, floordiv(b,4)"
        return TextError(f"'{self.text}' is not a size", hint=hint)

    def wrong(self, what: str, *, hint: str | None = None) -> JaxfleetError:
        return TextError(f"a size has {what}: {self.text[:60]}...", hint=hint)
