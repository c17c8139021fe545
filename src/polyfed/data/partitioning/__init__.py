"""Assigns examples to clients, and splits each client's examples into training, validation and test sets."""
