"""Callbacks follow a run round by round: they evaluate, save checkpoints, log and stop; users add their own."""
