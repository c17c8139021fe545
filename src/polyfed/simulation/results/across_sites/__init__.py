"""Scores every client's model on every other client's test examples."""
