"""Renders the HTML page of `polyfed report`."""
