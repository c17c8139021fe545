"""Computes the networks of many clients with the same architecture as one stacked network."""
