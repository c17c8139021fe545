"""Checks that the clients' networks run, and that a method can train them."""
