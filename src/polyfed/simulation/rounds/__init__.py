"""Runs one round (sampling, dispatch, replies, aggregation), and starts and resumes runs."""
