"""Compares several methods on the same clients: searches hyper-parameters, trains with several seeds, computes
confidence intervals, and answers in sentences."""
