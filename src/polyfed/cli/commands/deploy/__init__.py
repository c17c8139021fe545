"""Implements the commands `polyfed flower` and `polyfed flower doctor`."""
