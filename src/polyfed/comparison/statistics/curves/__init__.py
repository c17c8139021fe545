"""Reads learning curves: the round at which runs are compared, and whether training was long enough."""
