"""Assigns examples to clients, and splits them into training, validation and test sets."""
