"""Passes that lower the memory of a step: reuse, recomputation, offloading, scheduling."""
