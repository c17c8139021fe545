"""Checks the clients' replies of a round and adds them up: plainly, by region, or as secure aggregation does."""
