"""Evaluates networks: metrics, and the scores of a network on a client's examples."""
