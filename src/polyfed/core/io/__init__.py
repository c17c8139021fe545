"""Reads and writes files safely: atomic writes, size limits, and imports only of code that the user trusts."""
