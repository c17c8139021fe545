"""Computes the statistics of a comparison: confidence intervals and tests over seeds and test examples."""
