"""Searches hyper-parameters, and finds the best number of rounds for each client that trains on its own data only."""
