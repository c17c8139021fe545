"""Clips the messages that a site sends, adds noise to them, and records how much of the site's privacy budget they
spend.
"""
