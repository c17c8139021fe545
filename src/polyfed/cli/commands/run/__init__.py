"""The commands `run`, `resume`, `evaluate` and `graph`."""
