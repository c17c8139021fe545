"""Reads and writes the run directory: configuration, metrics, checkpoints, predictions and models."""
