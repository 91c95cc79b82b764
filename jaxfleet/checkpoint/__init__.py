"""Checkpoints: written atomically, in parts, and read whole or in other parts."""
