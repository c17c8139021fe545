"""Simulates a federation: samples clients, runs them on an engine, aggregates, evaluates and saves checkpoints."""
