"""Lowering of a fluid program and its feed for a device."""
