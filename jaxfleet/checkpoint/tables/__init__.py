"""Tables in checkpoints: full saves and deltas, for any number of servers.

A table is a few arrays for each span of adjacent buckets, stored in a part like other arrays::

    table/users/about               its spec; for a delta, the step that it starts from
    table/users/0-512/index         numbers of rows, candidates and tombstones in each bucket
    table/users/0-512/keys          int64[n], by bucket and key
    table/users/0-512/rows          float32[n, dim]
    table/users/0-512/state.*       optimizer state
    table/users/0-512/counter.*     the last touch, touches, shows, clicks
    table/users/0-512/candidates    keys that await admission; `counts`, `counted`
    table/users/0-512/gone          tombstones: keys removed since, in a delta

A delta names its base (`after` in its manifest), a checkpoint of the same series that is kept as
long as it is needed.

A single process saves with `TableSeries`. The servers of a job pass `table_pieces` to `write_part`
with their other values, and one of them commits; `load_tables` then reads the buckets that a server
has now.
"""

from jaxfleet.checkpoint.tables.row_pieces import table_pieces as table_pieces
from jaxfleet.checkpoint.tables.saved_tables import SavedTable as SavedTable
from jaxfleet.checkpoint.tables.saved_tables import export_arrays as export_arrays
from jaxfleet.checkpoint.tables.saved_tables import export_text as export_text
from jaxfleet.checkpoint.tables.saved_tables import saved_tables as saved_tables
from jaxfleet.checkpoint.tables.table_series import TableSeries as TableSeries
from jaxfleet.checkpoint.tables.table_series import compact as compact
from jaxfleet.checkpoint.tables.table_series import load_tables as load_tables
from jaxfleet.checkpoint.tables.table_series import save_tables as save_tables
