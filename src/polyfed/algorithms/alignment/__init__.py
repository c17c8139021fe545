"""Methods that align representations of different networks: FedHeNN in both forms."""
