"""Small programs with realistic shapes, of the kinds that public examples train."""
