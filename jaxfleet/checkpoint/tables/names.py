"""What the arrays of a table are called in a checkpoint."""

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote

ABOUT = "about"
INDEX = "index"
ROW_COLUMNS = ("keys", "rows")  # and one for each of the two below
STATE = "state."
COUNTER = "counter."
CANDIDATE_COLUMNS = ("candidates", "counts", "counted")
GONE = "gone"
_NAME = re.compile(r"table/([^/]+)/(?:about|(\d{1,5})-(\d{1,5})/(.+))", re.DOTALL)


@dataclass(frozen=True, order=True)
class Span:
    """Neighbouring buckets whose rows were written together.

    Attributes:
        first: the first bucket.
        stop: the first that is not in it.
    """

    first: int
    stop: int


@dataclass(frozen=True)
class ArrayName:
    """What the name of an array says.

    Attributes:
        table: whose it is.
        span: of which buckets; None for what is said about the whole table.
        column: which of their arrays.
    """

    table: str
    span: Span | None
    column: str

    def __str__(self) -> str:
        where = "" if self.span is None else f"{self.span.first}-{self.span.stop}/"
        return f"table/{quote(self.table, safe='')}/{where}{self.column}"

    @classmethod
    def read(cls, name: str) -> "ArrayName | None":
        """Returns what a name says, None where it is of no table."""
        if (match := _NAME.fullmatch(name)) is None:
            return None
        table = unquote(match[1])
        if match[4] is None:
            return cls(table, None, ABOUT)
        return cls(table, Span(int(match[2]), int(match[3])), match[4])
