"""Utilities of fleets."""
