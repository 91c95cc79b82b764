"""The fenced blocks of the documentation, with the comments that say how each is checked.

A comment right above a block, which no reader sees:

    <!-- file: NAME -->     the block is the file NAME of the page's folder; it is written, not run
    <!-- output -->         the block is what the blocks since the last such one printed
    <!-- prints -->         the last commands printed its lines in their order, among others
    <!-- prints unordered -->  the same in any order
    <!-- raises: ERROR -->  the block ends with that exception
    <!-- run -->            the block, of bash, is run and not only parsed
    <!-- run: grid -->      the same, with the tests marked grid: it takes long
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Pages whose blocks are files to save and commands, which start jobs: the grid executes them.
FOLLOWED = ("docs/tutorials/", "docs/migrating/")
LANGUAGES = frozenset({"python", "bash", "console", "text", "diff", "toml", "yaml", "json", "ini"})
_BLOCK = re.compile(
    r"^(?:<!-- *(?P<marker>[^\n]*?) *-->\n+)?"
    r"(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```[ ]*$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        page: path of its page in the checkout.
        line: number of its first line, from 1, behind the fence.
        language: the word behind the fence.
        marker: the comment above it, or nothing.
        text: its lines.
    """

    page: str
    line: int
    language: str
    marker: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    def marked(self, name: str) -> str | None:
        """Returns what the marker gives `name`, or None if it is another marker."""
        found = re.fullmatch(rf"{name}(?:: *(.*))?", self.marker)
        return None if found is None else found[1] or ""


def pages() -> list[str]:
    """Returns the paths of all pages: docs/ and the pages at the top."""
    docs = (path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md"))
    return ["README.md", "CONTRIBUTING.md", "SECURITY.md", *sorted(docs)]


def blocks_of(page: str) -> list[Block]:
    """Returns the blocks of a page, in their order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        lines = match["text"].splitlines(keepends=True)
        found.append(
            Block(
                page,
                text.count("\n", 0, match.start("text")) + 1,
                match["language"],
                match["marker"] or "",
                "".join(line.removeprefix(match["indent"]) for line in lines),
            )
        )
    return found


def is_run(block: Block, *, in_grid: bool = False) -> bool:
    """Whether running the page runs this block, by default or also in the grid."""
    if block.marked("file") is not None:
        return False
    when = {"", "grid"} if in_grid else {""}
    return block.language == "python" or block.marked("run") in when
