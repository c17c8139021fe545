"""Answers the server's messages at a site: trains, evaluates, stores the private state, and limits what leaves the
site.
"""
