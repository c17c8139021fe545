"""Runs a network's program, and records between which layers values flow."""
