"""Computes the networks of many clients of one architecture as one stacked network."""
