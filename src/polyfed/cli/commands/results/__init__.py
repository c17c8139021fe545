"""Implements the commands `polyfed report`, `polyfed predict` and `polyfed export`."""
