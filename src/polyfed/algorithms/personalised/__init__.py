"""Provides methods that give each client a personal model; all these models have one architecture."""
