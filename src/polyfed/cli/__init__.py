"""Implements the command line `polyfed`."""
