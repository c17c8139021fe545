"""Provides methods whose clients train submodels, with fewer units per layer, of one wider network."""
