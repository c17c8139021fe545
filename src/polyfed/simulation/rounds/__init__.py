"""Runs one round (sampling of clients, messages, replies, aggregation), and starts and resumes runs."""
