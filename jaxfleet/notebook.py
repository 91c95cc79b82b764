"""HTML that notebooks show: escaping, colours, and the parts of every representation.

A representation is one `div` with its style: no script, and no address. Text becomes markup in one
place, `element`, which escapes whatever is not `Markup` already. Colours follow the theme that
Jupyter, VS Code or a page announces; without one they read on white and on black.
"""

from collections.abc import Iterable, Sequence
from html import escape

_CONTROLS = {
    code: f"\\x{code:02x}" for code in (*range(9), 11, 12, *range(14, 32), *range(127, 160))
}
_DIRECTIONS = {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}
MOST_ROWS = 50  # of a table whose length depends on the program
_VISIBLE = _CONTROLS | _DIRECTIONS

# The classes are those of the report's page: t types, o operators, a attributes, l literals, p what
# is beside the point. Tables name the root thrice, to weigh more than a notebook's own rules.
_STYLE = """\
.jaxfleet{--t:#0b7a72;--o:#9333c4;--a:#857037;--l:#c2500f;--p:#74808d;--line:#8886;--one:#3573b9;\
--two:#b8630a;font:13px/1.5 system-ui,sans-serif}
:is([data-jp-theme-light=false],[data-theme=dark],[theme=dark],[data-md-color-scheme=slate],\
.vscode-dark,.vscode-high-contrast) .jaxfleet{--t:#6fd0c8;--o:#d59bf0;--a:#c9b880;--l:#f0a27d;\
--p:#9aa6b4;--one:#7db9f5;--two:#f0b070}
.jaxfleet :is(code,pre){font:12px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;\
color:inherit;background:none;padding:0}
.jaxfleet pre{margin:2px 0 6px;overflow-x:auto;white-space:pre}
.jaxfleet .t{color:var(--t)}.jaxfleet .o{color:var(--o);font-weight:600}.jaxfleet .a{color:var(--a)}
.jaxfleet .l{color:var(--l)}.jaxfleet .p{color:var(--p)}.jaxfleet .k{font-weight:600}
.jaxfleet.jaxfleet.jaxfleet table{border-collapse:collapse;margin:4px 0;font-size:inherit}
.jaxfleet.jaxfleet.jaxfleet tr{background:none}
.jaxfleet.jaxfleet.jaxfleet :is(td,th){text-align:left;vertical-align:top;padding:2px 12px 2px 0;\
border:0;border-top:1px solid var(--line);white-space:normal;max-width:none}
.jaxfleet.jaxfleet.jaxfleet th{font-weight:500;color:var(--p)}
.jaxfleet.jaxfleet.jaxfleet .r{text-align:right;font-variant-numeric:tabular-nums}
.jaxfleet summary{cursor:pointer}
.jaxfleet svg{display:block;max-width:100%;margin:4px 0}
.jaxfleet svg text{font:11px system-ui,sans-serif;fill:currentColor}
"""


class Markup(str):
    """Text that is HTML already.

    Examples:
        >>> from jaxfleet.notebook import Markup, element
        >>> element("b", "1 < 2", Markup("<br>"))
        '<b>1 &lt; 2<br></b>'
    """

    __slots__ = ()


def element(name: str, *children: str, **attributes: str) -> Markup:
    """Returns an element; children and values of attributes are escaped unless they are `Markup`.

    Args:
        name: its tag.
        children: text, or elements.
        attributes: by name; `class_` is `class`, and `stroke_width` is `stroke-width`.

    Examples:
        >>> from jaxfleet.notebook import element
        >>> element("a", "x < 1", href="#top", class_="p")
        '<a href="#top" class="p">x &lt; 1</a>'
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_escaped(value)}"'
        for key, value in attributes.items()
    )
    return Markup(f"<{name}{given}>{joined(*children)}</{name}>")


def joined(*children: str) -> Markup:
    """Returns text and elements, one after another.

    Examples:
        >>> from jaxfleet.notebook import element, joined
        >>> joined("loss & ", element("b", "0.5"))
        'loss &amp; <b>0.5</b>'
    """
    return Markup("".join(map(_escaped, children)))


def shown(*children: str) -> str:
    """Returns a whole representation.

    Examples:
        >>> from jaxfleet.notebook import element, shown
        >>> html = shown(element("code", "fc1.w"))
        >>> html[:23], html[-25:]
        ('<div class="jaxfleet"><', '><code>fc1.w</code></div>')
    """
    return element("div", element("style", Markup(_STYLE)), *children, class_="jaxfleet")


def head(what: str, name: str, *facts: str) -> Markup:
    """Returns the first line: a class, the name of the object, and facts about it.

    Examples:
        >>> from jaxfleet.notebook import head
        >>> head("Program", "train_step")
        '<div><b>Program</b> <code>train_step</code></div>'
    """
    parts = [element("b", what), " ", element("code", name)]
    for fact in facts:
        parts += [element("span", " \u00b7 ", class_="p"), fact]
    return element("div", *parts)


def table(
    rows: Iterable[Sequence[str]], *, heads: Sequence[str] = (), right: Iterable[int] = ()
) -> Markup:
    """Returns a table; without `heads`, the first cell of a row is its head.

    Columns `right`, counted from 0, are numbers.

    Examples:
        >>> from jaxfleet.notebook import table
        >>> table([["w", "3"]], right=[1])
        '<table><tr><th scope="row">w</th><td class="r">3</td></tr></table>'
    """
    ends, lines = set(right), []
    if heads:
        cells = (
            _cell("th", head, is_number=at in ends, scope="col") for at, head in enumerate(heads)
        )
        lines.append(element("tr", *cells))
    for row in rows:
        cells = (
            _cell("th", text, is_number=False, scope="row")
            if not heads and at == 0
            else _cell("td", text, is_number=at in ends)
            for at, text in enumerate(row)
        )
        lines.append(element("tr", *cells))
    return element("table", *lines)


def cut_table(
    rows: Iterable[Sequence[str]], *, heads: Sequence[str], right: Iterable[int] = ()
) -> Markup:
    """Returns a table of at most `MOST_ROWS` rows, with the number of those that are left out.

    Examples:
        >>> from jaxfleet.notebook import cut_table
        >>> "950 more rows" in cut_table([[str(n)] for n in range(1000)], heads=["n"])
        True
    """
    found = list(rows)
    made = table(found[:MOST_ROWS], heads=heads, right=right)
    if len(found) <= MOST_ROWS:
        return made
    count = f"\u2026 {len(found) - MOST_ROWS:,} more rows: print it to read all"
    return joined(made, element("div", count, class_="p"))


def folded(summary: str, *children: str, is_open: bool = False) -> Markup:
    """Returns parts under a line that opens and closes them.

    Examples:
        >>> from jaxfleet.notebook import folded
        >>> folded("2 passes", "dce, donate")
        '<details><summary>2 passes</summary>dce, donate</details>'
    """
    more = {"open": ""} if is_open else {}
    return element("details", element("summary", summary), *children, **more)


def _cell(name: str, text: str, *, is_number: bool, **attributes: str) -> Markup:
    return element(name, text, **({"class_": "r"} if is_number else {}), **attributes)


def _escaped(text: str) -> str:
    """Returns HTML that shows a text: marks that would hide or turn it around are spelled out."""
    if isinstance(text, Markup):
        return text
    return escape(text.translate(_VISIBLE).encode("utf-8", "backslashreplace").decode())
