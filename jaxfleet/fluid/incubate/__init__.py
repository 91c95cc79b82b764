"""Paddle's `fluid.incubate`."""
