"""Stores and reads predictions for each client's examples."""
