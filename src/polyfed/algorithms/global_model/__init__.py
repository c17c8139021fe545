"""Provides methods whose result is one model for all clients."""
