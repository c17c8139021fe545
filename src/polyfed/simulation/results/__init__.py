"""Results of a run: metrics, models, predictions, and analyses that continue from its final state."""
