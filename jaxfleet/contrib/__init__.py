"""Packages above `jaxfleet.fluid` that few programs need."""
