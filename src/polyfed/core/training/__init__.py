"""Trains one client, or many clients of one architecture at once: the training loop, its configuration and its losses."""
