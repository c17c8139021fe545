"""Implements the command `polyfed compare`."""
