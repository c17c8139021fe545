"""Defines the error by which a site refuses a request."""


class RefusalError(Exception):
    """Raised when a site refuses a request; its text goes to the server, so it must reveal no data."""
