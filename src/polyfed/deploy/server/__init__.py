"""Runs a deployment at the server: agrees with the sites, checks their replies, and aggregates them."""
