"""Adds noise to what a site sends, and counts what that costs."""
