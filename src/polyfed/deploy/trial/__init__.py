"""Writes a deployment's project, and runs it on one machine for a trial."""
