"""Methods that align the representations of different networks: FedHeNN in both forms."""
