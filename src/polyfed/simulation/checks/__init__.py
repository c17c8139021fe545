"""Checks clients, networks, data and settings before the first round."""
