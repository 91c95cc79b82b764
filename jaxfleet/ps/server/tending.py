"""What trainers ask of a whole table between two steps.

`shrink` has rows go: those that its evictions say, or with `refill` all of them, for those of a
checkpoint (its folder) or for none (an empty text). `export` gives rows out.
"""

from collections.abc import Callable
from dataclasses import dataclass

from jaxfleet.ps.messages import Kind, Plain, Tensor
from jaxfleet.ps.server.desk import Desk, RefusedError, Request, text_of
from jaxfleet.ps.server.held import Held
from jaxfleet.ps.server.keyed import table_of
from jaxfleet.ps.server.table import Table
from jaxfleet.tables import RowBatch
from jaxfleet.tables.buckets import BUCKETS

KINDS = frozenset({Kind.SHRINK, Kind.EXPORT})
Work = tuple[str, Callable[[], object], Callable[[object], None]]
"""What the server does meanwhile, the work, and what takes what that gives."""


def check(request: Request, held: Held) -> None:
    """Refuses a request that says not what it needs.

    Raises:
        RefusedError: it names no table that is here; or no token, or no bucket.
    """
    table_of(request.message, held)
    if request.message.kind is Kind.SHRINK:
        text_of(request.message, "token")
        _refill(request)
    else:
        _first(request)


@dataclass(frozen=True)
class Tending:
    """Does it, where no block is under way.

    Attributes:
        held: has the tables.
        desk: where answers go.
        keep: writes an own checkpoint, if there are any, and then goes on: what went may not come
            back with a server that starts again.
        free: is called when it is done.
    """

    held: Held
    desk: Desk
    keep: Callable[[Callable[[], None]], None]
    free: Callable[[], None]

    def work(self, request: Request) -> Work | None:
        """Returns the work that a request needs, None where it is answered already."""
        table = table_of(request.message, self.held)
        if request.message.kind is Kind.EXPORT:
            return self._export(request, table)
        token = text_of(request.message, "token")
        if table.shrunk[0] == token:
            self._told(request, table)
            return None
        return self._shrink(request, table, token)

    def _shrink(self, request: Request, table: Table, token: str) -> Work:
        step = self.held.progress.row_step  # later than any save
        refill, buckets = _refill(request), self.held.plan.buckets

        def run() -> object:
            return table.shrink(step) if refill is None else table.refill(refill, buckets, step)

        def then(count: object) -> None:
            table.shrunk = (token, int(str(count)))
            self.keep(kept)

        def kept() -> None:
            self._told(request, table)
            self.free()

        return f"shrinking '{table.spec.name}'", run, then

    def _told(self, request: Request, table: Table) -> None:
        body: dict[str, Plain] = {"rows": table.shrunk[1]}
        self.desk.answer(request.peer, request.message, Kind.OK, body)

    def _export(self, request: Request, table: Table) -> Work:
        first = _first(request)

        def run() -> object:
            return table.rows_from(first)

        def then(found: object) -> None:
            assert isinstance(found, tuple)
            batch, following = found
            self._given(request, batch, following)

        return f"giving rows of '{table.spec.name}' out", run, then

    def _given(self, request: Request, batch: RowBatch | None, following: int) -> None:
        tensors: tuple[Tensor, ...] = ()
        if batch is not None:
            tensors = (Tensor("keys", batch.keys), Tensor("rows", batch.rows))
        body: dict[str, Plain] = {"next": following if batch is not None else None}
        self.desk.answer(request.peer, request.message, Kind.ROWS, body, tensors)
        self.free()


def _refill(request: Request) -> str | None:
    given = request.message.body.get("refill")
    if given is not None and not isinstance(given, str):
        what = f"'refill' is the folder of a checkpoint, or empty, and not {given!r}"
        raise RefusedError("bad_message", what)
    return given


def _first(request: Request) -> int:
    first = request.message.body.get("first")
    if not isinstance(first, int) or isinstance(first, bool) or not 0 <= first <= BUCKETS:
        what = f"an export needs 'first', a bucket from 0 to {BUCKETS}, and not {first!r}"
        raise RefusedError("bad_message", what)
    return first
