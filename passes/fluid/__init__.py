"""Passes that write programs in fluid's dialect: ranks, trainers and servers."""
