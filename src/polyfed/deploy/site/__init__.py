"""Answers the server at a site: trains, evaluates, keeps the private state, and guards what leaves."""
