"""Reads the runs that a report shows, and computes the numbers about them that the report shows."""
