"""Provides methods whose clients train submodels, with fewer units per layer or fewer layers, of one larger network."""
