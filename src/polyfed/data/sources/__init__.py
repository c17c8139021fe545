"""Reads data sets: published ones, and the user's tables, images and arrays."""
