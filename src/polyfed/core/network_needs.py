"""What a method asks of the clients' networks, as far as it can be tried before the first round."""

from abc import ABC, abstractmethod

from polyfed.core.algorithm import Architecture, Client


class ValidatesNetworks(ABC):
    """For a method that looks into the clients' networks, which not every network allows."""

    @abstractmethod
    def validate_network(self, client: Client) -> None:
        """Looks for what the method will need of this client's network. It is called before the first round, once for each
        architecture and form of data.

        Raises:
            UserError: it is not there.
        """


class TrainsAuxiliaryNetwork(ABC):
    """For a method whose clients train a network of the method's besides their own."""

    @abstractmethod
    def auxiliary_network(self, client: Client) -> Architecture:
        """That network, for this client's data."""
