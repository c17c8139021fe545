"""Writes a deployment's project, and tries it on one machine."""
