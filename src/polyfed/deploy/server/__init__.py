"""Runs a deployment at the server: agrees with the sites on the run, checks their replies and aggregates them."""
