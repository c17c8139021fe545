"""Answers the server at a site: trains, evaluates, keeps the private state, and limits what leaves the site."""
