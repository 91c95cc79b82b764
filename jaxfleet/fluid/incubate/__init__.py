"""What fluid kept under `incubate`."""
