"""Starts the processes of a job on one machine, and ends them all."""
