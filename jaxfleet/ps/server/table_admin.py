"""Administration of whole tables: shrink, refill and export.

`shrink` removes rows: those that the table's evictions select, or with `refill` all of them,
replaced by those of a checkpoint (its folder) or by none (an empty text). `export` returns rows.
"""

from collections.abc import Callable
from dataclasses import dataclass

from jaxfleet.ps.server.outbox import Outbox, Request, RequestError, string_field
from jaxfleet.ps.server.row_requests import requested_table
from jaxfleet.ps.server.state import ServerState
from jaxfleet.ps.server.table import ServerTable
from jaxfleet.tables import RowBatch
from jaxfleet.tables.buckets import BUCKETS
from jaxfleet.transport.messages import Kind, Plain, Tensor

KINDS = frozenset({Kind.SHRINK, Kind.EXPORT})
Work = tuple[str, Callable[[], object], Callable[[object], None]]
"""What the server does meanwhile, the work, and what takes what that gives."""


def check_request(request: Request, held: ServerState) -> None:
    """Rejects a request without a valid table, token or bucket."""
    requested_table(request.message, held)
    if request.message.kind is Kind.SHRINK:
        string_field(request.message, "token")
        _refill(request)
    else:
        _first(request)


@dataclass(frozen=True)
class TableAdmin:
    """Executes requests while no block is running.

    Attributes:
        keep: writes a recovery checkpoint if enabled, and then continues: removed rows must not
            reappear with a restarted server.
    """

    held: ServerState
    outbox: Outbox
    keep: Callable[[Callable[[], None]], None]
    free: Callable[[], None]

    def work(self, request: Request) -> Work | None:
        """Returns the work of a request, None if it was answered."""
        table = requested_table(request.message, self.held)
        if request.message.kind is Kind.EXPORT:
            return self._export(request, table)
        token = string_field(request.message, "token")
        if table.shrunk[0] == token:
            self._told(request, table)
            return None
        return self._shrink(request, table, token)

    def _shrink(self, request: Request, table: ServerTable, token: str) -> Work:
        step = self.held.scheduler.row_step  # later than any save
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

    def _told(self, request: Request, table: ServerTable) -> None:
        body: dict[str, Plain] = {"rows": table.shrunk[1]}
        self.outbox.answer(request.peer, request.message, Kind.OK, body)

    def _export(self, request: Request, table: ServerTable) -> Work:
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
        self.outbox.answer(request.peer, request.message, Kind.ROWS, body, tensors)
        self.free()


def _refill(request: Request) -> str | None:
    given = request.message.body.get("refill")
    if given is not None and not isinstance(given, str):
        what = f"'refill' is the folder of a checkpoint, or empty, and not {given!r}"
        raise RequestError("bad_message", what)
    return given


def _first(request: Request) -> int:
    first = request.message.body.get("first")
    if not isinstance(first, int) or isinstance(first, bool) or not 0 <= first <= BUCKETS:
        what = f"an export needs 'first', a bucket from 0 to {BUCKETS}, and not {first!r}"
        raise RequestError("bad_message", what)
    return first
