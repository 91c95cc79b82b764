"""Sparse tables: rows by int64 key, their description and their storage."""

from jaxfleet.tables.optimizer_parts import Adagrad as Adagrad
from jaxfleet.tables.optimizer_parts import Adam as Adam
from jaxfleet.tables.optimizer_parts import DownpourAdagrad as DownpourAdagrad
from jaxfleet.tables.optimizer_parts import DownpourAdam as DownpourAdam
from jaxfleet.tables.optimizer_parts import Momentum as Momentum
from jaxfleet.tables.optimizer_parts import Rmsprop as Rmsprop
from jaxfleet.tables.optimizer_parts import Sgd as Sgd
from jaxfleet.tables.optimizer_parts import Summary as Summary
from jaxfleet.tables.row_batch import RowBatch as RowBatch
from jaxfleet.tables.row_batch import RowKeeper as RowKeeper
from jaxfleet.tables.spec import AfterCount as AfterCount
from jaxfleet.tables.spec import ByChance as ByChance
from jaxfleet.tables.spec import ByScore as ByScore
from jaxfleet.tables.spec import Capacity as Capacity
from jaxfleet.tables.spec import Constant as Constant
from jaxfleet.tables.spec import Normal as Normal
from jaxfleet.tables.spec import TableSpec as TableSpec
from jaxfleet.tables.spec import Uniform as Uniform
from jaxfleet.tables.spec import Unseen as Unseen
from jaxfleet.tables.store import TableStore as TableStore
from jaxfleet.tables.tiered import TieredStore as TieredStore
from jaxfleet.tables.tiered import make_store as make_store
