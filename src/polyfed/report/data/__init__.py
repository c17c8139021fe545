"""Reads the runs that a report shows, and computes its figures."""
