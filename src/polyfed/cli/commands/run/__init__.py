"""Implements the commands `polyfed run`, `resume`, `evaluate` and `graph`."""
