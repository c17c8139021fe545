"""Reads published data sets, and users' tables, images and arrays."""
