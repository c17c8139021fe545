"""Evaluates networks: computes losses and metrics of a network on a client's examples."""
