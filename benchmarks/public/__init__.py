"""Programs of the kinds that public examples train, each small and of a realistic shape."""
