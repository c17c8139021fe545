"""Renders the HTML report."""
