"""Provides methods of personalised neural architecture search: FedPNAS and FedDSNAS."""
