"""The run directory: checkpoints, progress, and what a run gives back."""
