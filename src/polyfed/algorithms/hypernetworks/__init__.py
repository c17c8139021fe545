"""Methods whose server generates or mixes each client's weights by a hypernetwork."""
