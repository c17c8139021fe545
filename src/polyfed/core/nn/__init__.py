"""Handles networks: a cache of modules, buffers, tied weights, optimisers."""
