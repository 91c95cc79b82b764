"""Passes for mixed precision and loss scaling."""
