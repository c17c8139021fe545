"""Intervals and tests over seeds and test examples."""
