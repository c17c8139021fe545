"""Runs the training runs of a comparison, and shows how far they are."""
