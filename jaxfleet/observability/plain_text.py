"""Text of another process, made safe for terminals, logs and pages."""

_CUT = "..."


def printable(text: str, most: int | None = None) -> str:
    """Returns a text without control characters and lone surrogates, cut to a length.

    What a terminal would obey becomes `?`, and so does what UTF-8 cannot encode.

    >>> printable("a" + chr(10) + "b")
    'a?b'
    >>> printable("a long name", most=8)
    'a lon...'
    """
    if most is not None and len(text) > most:
        text = f"{text[: most - len(_CUT)]}{_CUT}"
    if text.isprintable():
        return text
    return "".join(mark if mark.isprintable() else "?" for mark in text)
