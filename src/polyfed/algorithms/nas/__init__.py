"""Methods that search a personal architecture: FedPNAS and FedDSNAS."""
