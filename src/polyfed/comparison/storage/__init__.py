"""Reads and writes the directory of a comparison."""
