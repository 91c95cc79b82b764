"""Captures a user's training step as a Program."""

from jaxfleet.capture.captured import Captured as Captured
from jaxfleet.capture.captured import capture as capture
from jaxfleet.capture.marker import distributed_optimizer as distributed_optimizer
from jaxfleet.capture.signature import Signature as Signature
from jaxfleet.capture.tables import EmbeddingTable as EmbeddingTable
from jaxfleet.capture.tables import embedding_table as embedding_table
from jaxfleet.capture.trees import Leaf as Leaf
