"""Capture of a user's training step as a Program."""

from jaxfleet.capture.captured import Captured as Captured
from jaxfleet.capture.captured import capture as capture
from jaxfleet.capture.embedding.tables import EmbeddingTable as EmbeddingTable
from jaxfleet.capture.embedding.tables import embedding_table as embedding_table
from jaxfleet.capture.gradient_marker import distributed_optimizer as distributed_optimizer
from jaxfleet.capture.signature import Leaf as Leaf
from jaxfleet.capture.signature import Signature as Signature
