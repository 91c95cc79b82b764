"""Utilities shared by passes of several packages."""
