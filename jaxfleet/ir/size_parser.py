"""Reads symbolic sizes, spelled as `Dim` prints them or as jax does."""

import re

from jaxfleet.errors import TextError
from jaxfleet.ir.dims import CALLS, LETTER, Size, call, letter

_TOKEN = re.compile(r"[0-9]+|[A-Za-z_]\w*|\S")
_MOST_NESTED = 64  # parentheses, which are read by recursion
_MAX_POWER = 64  # far beyond any shape; b^999999999 would only burn time


def parse_size(text: str) -> Size:
    """Reads a size; spaces do not matter, and `b^2` is a power.

    Raises:
        TextError: the text is not a size.
    """
    return _SizeParser(text).parse()


class _SizeParser:
    """Reads `sum := product (('+'|'-') product)*` by recursive descent."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[str] = _TOKEN.findall(text)
        self.at = 0
        if text.count("(") > _MOST_NESTED:
            what = f"a size has more than {_MOST_NESTED} parentheses: {text[:60]}..."
            raise TextError(what)

    def parse(self) -> Size:
        try:
            size = self._sum()
        except ZeroDivisionError:
            raise TextError(f"'{self.text}' divides by zero") from None
        if self.at != len(self.tokens):
            raise self._error()
        return size

    def _sum(self) -> Size:
        total = -self._product() if self._take("-") else self._product()
        while True:
            if self._take("+"):
                total = total + self._product()
            elif self._take("-"):
                total = total - self._product()
            else:
                return total

    def _product(self) -> Size:
        product = self._power()
        while self._take("*"):
            product = product * self._power()
        return product

    def _power(self) -> Size:
        base = self._atom()
        if not self._take("^"):
            return base
        result: Size = 1
        power = self._next()
        if not power.isdecimal() or int(power) > _MAX_POWER:
            raise self._error()
        for _ in range(int(power)):
            result = result * base
        return result

    def _atom(self) -> Size:
        token = self._next()
        if token.isdecimal():
            return int(token)
        if token == "(":
            size = self._sum()
            self._expect(")")
            return size
        if LETTER.fullmatch(token) is None:
            raise self._error()
        if not self._take("("):
            return letter(token)
        if token not in CALLS:
            raise self._error()
        x = self._sum()
        self._expect(",")
        y = self._sum()
        self._expect(")")
        return call(token, x, y)

    def _next(self) -> str:
        if self.at == len(self.tokens):
            raise self._error()
        self.at += 1
        return self.tokens[self.at - 1]

    def _take(self, token: str) -> bool:
        found = self.at < len(self.tokens) and self.tokens[self.at] == token
        self.at += found
        return found

    def _expect(self, token: str) -> None:
        if not self._take(token):
            raise self._error()

    def _error(self) -> TextError:
        what = f"'{self.text}' is not a size"
        return TextError(what, hint="sizes read like 784, b, 2*b+1, floordiv(b,4)")
