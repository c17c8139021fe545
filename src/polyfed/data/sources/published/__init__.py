"""Reads published data sets."""
