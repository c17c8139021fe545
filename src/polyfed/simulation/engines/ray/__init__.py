"""Runs clients on the workers of a Ray cluster."""
