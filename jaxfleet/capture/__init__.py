"""Captures a user's training step as a Program."""

from jaxfleet.capture.marker import distributed_optimizer as distributed_optimizer
