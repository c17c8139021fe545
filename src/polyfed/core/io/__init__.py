"""Reads and writes files safely: atomic writes, size limits, imports of trusted code, checks of values."""
