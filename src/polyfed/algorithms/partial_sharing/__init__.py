"""Provides methods in which clients share some layers of a network, and each client keeps the others."""
