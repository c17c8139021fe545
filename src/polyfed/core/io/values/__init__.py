"""Checks and converts the values that users, files and messages give."""
