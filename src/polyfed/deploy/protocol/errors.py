"""Defines the error by which a site refuses a request."""


class RefusalError(Exception):
    """Raised when a site refuses a request of the server. The site sends the error's text to the server, so it must not
    reveal anything about the data or the network.
    """
