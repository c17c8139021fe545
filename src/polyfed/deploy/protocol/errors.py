"""Defines the error by which a site refuses a request."""


class RefusalError(Exception):
    """Refuses what the server asks of a site; its sentence goes to the server, so it holds nothing of data or network."""
