"""Provides methods that give each client its own model of one common architecture."""
