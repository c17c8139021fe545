"""Clips the messages that a site sends, adds noise to them, and keeps account of the privacy budget that they spend."""
