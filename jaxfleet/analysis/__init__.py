"""Analyses of a program: sharding, optimizer groups, memory, placement on servers, fingerprints."""
