"""Holds the results of a run: metrics, models, predictions, and analyses that start from its final state."""
