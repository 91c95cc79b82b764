"""Compiles a one-device JAX training program into a distributed one."""
