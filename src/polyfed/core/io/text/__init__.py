"""Formats text that people read: numbers, names, advice, and text from other people."""
