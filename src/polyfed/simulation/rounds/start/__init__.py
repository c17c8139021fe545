"""Starts and resumes runs: what is checked before the first round, and the checkpoint to continue from."""
