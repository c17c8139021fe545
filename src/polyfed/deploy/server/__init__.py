"""Runs the server of a deployment: it sets up the run with the sites, checks their replies and aggregates them."""
