"""Checkpoints: written atomically, in parts, and read whole or in other parts.

A checkpoint is a folder::

    checkpoint.json          step, facts, parts; written last, and required
    part-server%200-1f0c9a2b/
        part.json            which rows of which arrays, and the sha256 of every block of rows
        data/                the rows: tensorstore's zarr3 arrays, packed in few files by its ocdbt

Each process calls `write_part`, and one of them then calls `commit` with all receipts. Saving again
into the same folder replaces the checkpoint atomically. Only one save at a time may write into a
folder.
"""

from jaxfleet.checkpoint.data_position import position_facts as position_facts
from jaxfleet.checkpoint.data_position import read_position as read_position
from jaxfleet.checkpoint.manifest import PartReceipt as PartReceipt
from jaxfleet.checkpoint.manifest import Piece as Piece
from jaxfleet.checkpoint.reading import Checkpoint as Checkpoint
from jaxfleet.checkpoint.reading import open_checkpoint as open_checkpoint
from jaxfleet.checkpoint.saving import commit as commit
from jaxfleet.checkpoint.saving import discard as discard
from jaxfleet.checkpoint.saving import is_disk_full as is_disk_full
from jaxfleet.checkpoint.saving import save_arrays as save_arrays
from jaxfleet.checkpoint.saving import save_pieces as save_pieces
from jaxfleet.checkpoint.saving import write_part as write_part
from jaxfleet.checkpoint.series import CheckpointSeries as CheckpointSeries
