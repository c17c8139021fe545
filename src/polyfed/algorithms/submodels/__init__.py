"""Methods whose clients train submodels of a wider network."""
