"""Provides methods whose server has hypernetworks, which generate or mix the weights of each client's network."""
