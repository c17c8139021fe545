"""Trains the reference models of a comparison: simple models on each client's data only, and a network on the pooled
data of all clients."""
