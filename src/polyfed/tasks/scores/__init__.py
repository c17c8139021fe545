"""Computes the scores of tasks from outputs and targets."""
