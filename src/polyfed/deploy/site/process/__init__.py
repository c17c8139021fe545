"""Builds a site from its configuration, and runs its long-lived process."""
