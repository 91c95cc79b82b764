"""Passes for parameter servers: slicing, dispatch, and the programs of trainers and servers."""
