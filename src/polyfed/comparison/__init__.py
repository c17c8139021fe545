"""Compares several methods on the same clients: tuning, several seeds, confidence intervals, verdicts."""
