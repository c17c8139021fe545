"""Searches hyper-parameters, and finds how many rounds each client needs that trains alone."""
