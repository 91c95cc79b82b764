"""Embedding tables in a captured step: look-ups, their checks, and Flax modules for them."""
