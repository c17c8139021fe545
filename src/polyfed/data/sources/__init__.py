"""The data sets that a configuration can name."""
