"""Parses command line options and configuration files."""
