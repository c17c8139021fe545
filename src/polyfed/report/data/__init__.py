"""Reads the runs that a report shows, and computes the numbers that it shows of them."""
