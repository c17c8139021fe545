"""Adapts to this machine: memory and threads."""
