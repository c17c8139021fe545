"""Reads run directories and shows their results: the HTML report, figures, and exported networks."""
