"""Passes for collective training: captured steps rewritten for N devices."""
