"""Defines hypernetworks: networks that generate or weigh the parameters of other networks."""
