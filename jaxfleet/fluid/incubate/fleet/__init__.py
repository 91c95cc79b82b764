"""Fleets: jobs controlled through one object."""
