"""Placement of parameters on servers: slices, policies, transfer plans."""
