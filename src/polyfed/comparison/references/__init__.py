"""Trains the reference models of a comparison: what each client has alone, and one model on all data pooled."""
