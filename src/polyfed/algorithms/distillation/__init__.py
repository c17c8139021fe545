"""Provides methods in which clients exchange outputs or a shared network instead of their personal weights."""
