"""Simulates federated learning: samples clients, runs them on an engine, aggregates their replies, evaluates and saves
checkpoints."""
