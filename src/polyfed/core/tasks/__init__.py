"""Defines the interface of a prediction task, and finds tasks by their names."""
