"""Clients of one architecture as one stacked network."""
