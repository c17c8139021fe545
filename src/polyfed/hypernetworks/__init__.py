"""Defines hypernetworks: networks that generate the parameters of other networks, or weights with which to mix them."""
