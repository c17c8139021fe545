"""Methods whose clients train parts of a wider network."""
