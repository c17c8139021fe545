"""The command `polyfed`."""
