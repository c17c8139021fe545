"""Clips and adds noise to the messages that a site sends, and accounts for the privacy budget that they spend."""
