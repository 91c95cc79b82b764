"""The base of all fleets."""
