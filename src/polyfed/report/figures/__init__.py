"""Reads what methods have learned (aggregation weights, alignment, architectures), and draws cells and warm starts."""
