"""Reads a representation as a browser would: balanced elements, harmless ones, and its text."""

from html.parser import HTMLParser

ALLOWED = {
    *("div", "style", "b", "code", "span", "pre", "table", "tr", "td", "th", "ul", "li"),
    *("details", "summary", "svg", "title", "path", "text", "progress"),
}


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ALLOWED, tag
        for name, value in attrs:
            assert not name.startswith("on"), name
            assert name not in {"href", "src", "action"}, name
            assert "url(" not in (value or ""), value
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open and "title" not in self.open:
            self.text += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")


def text_of(markup: str) -> str:
    """Returns the text that a representation shows, after checking its elements."""
    markup.encode()
    assert "://" not in markup.split("</style>", maxsplit=1)[0], "an address in the style"
    reader = _Reader()
    reader.feed(markup)
    reader.close()
    assert reader.open == []
    return reader.text
