"""Defines the error by which a site refuses a request."""


class RefusalError(Exception):
    """Says why a site refuses a request of the server. The text is sent to the server, so it must not reveal anything
    about the data or the network.
    """
