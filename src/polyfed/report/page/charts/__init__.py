"""Draws charts as inline SVG."""
