"""Draws what a method has learned: aggregation weights, alignment, architectures, generated weights."""
