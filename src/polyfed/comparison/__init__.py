"""Several methods on the same clients: tuning, several seeds, intervals on new examples, verdicts."""
