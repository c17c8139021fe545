"""Models that a client or one server could fit without federated learning, for reference."""
