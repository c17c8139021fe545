"""Chooses the clients of each round, and simulates how long a round takes."""
