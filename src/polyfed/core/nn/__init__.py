"""Handles networks: one cached module per architecture, buffers, tied weights, optimisers, precision."""
