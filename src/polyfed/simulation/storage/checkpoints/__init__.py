"""Writes and reads checkpoints, and the states of clients that they share."""
