"""Tables in checkpoints: all rows, or what changed since an older one; for any number of servers.

A table is a few arrays for each span of neighbouring buckets, among the others of a part::

    table/users/about               its spec; since which step changes are there, if not all is
    table/users/0-512/index         how many rows, candidates and gone keys each bucket has
    table/users/0-512/keys          int64[n], by bucket and key
    table/users/0-512/rows          float32[n, dim]
    table/users/0-512/state.*       the optimizer's
    table/users/0-512/counter.*     the last touch, touches, shows, clicks
    table/users/0-512/candidates    keys that wait to be admitted; `counts`, `counted`
    table/users/0-512/gone          keys that went, in a checkpoint of changes

A checkpoint of changes names the one that they are of (`after` in its manifest), which is in the
same series and is kept as long as it is needed.

One process saves with `TableSeries`. Servers of a job give `table_pieces` to `write_part` with
their other values, and one commits; `load_tables` then reads the buckets that a server has now.
"""

from jaxfleet.checkpoint.tables.compacting import compact as compact
from jaxfleet.checkpoint.tables.exporting import export_arrays as export_arrays
from jaxfleet.checkpoint.tables.exporting import export_text as export_text
from jaxfleet.checkpoint.tables.loading import load_tables as load_tables
from jaxfleet.checkpoint.tables.pieces import table_pieces as table_pieces
from jaxfleet.checkpoint.tables.saved import SavedTable as SavedTable
from jaxfleet.checkpoint.tables.saved import saved_tables as saved_tables
from jaxfleet.checkpoint.tables.saving import save_tables as save_tables
from jaxfleet.checkpoint.tables.series import TableSeries as TableSeries
