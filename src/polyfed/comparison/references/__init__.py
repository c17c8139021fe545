"""Trains the reference models of a comparison: simple models that each client fits alone, and a network trained on the
pooled data of all clients."""
