"""The directory of a comparison: results, configuration, continuation."""
