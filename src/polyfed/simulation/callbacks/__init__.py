"""Holds callbacks, which follow a run round by round: they evaluate, save checkpoints, log or stop; users add more."""
