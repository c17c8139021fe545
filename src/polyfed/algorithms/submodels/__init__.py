"""Provides methods whose clients train submodels of one wider network."""
