"""Fits the simple models that a client has alone, with which methods are compared."""
