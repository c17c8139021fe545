"""Reads and writes files safely: atomic writes, checked reads, and the code that users trust."""
