"""Measures what the networks of a run tell of their training examples (`polyfed.audit`)."""
