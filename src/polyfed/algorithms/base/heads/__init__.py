"""Provides what methods share that treat the last layers of networks apart."""
