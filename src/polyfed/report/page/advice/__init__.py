"""Renders the answer of a comparison: the card on top, and the advice to each site."""
