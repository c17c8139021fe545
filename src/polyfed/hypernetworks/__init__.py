"""Defines hypernetworks: networks that generate the parameters of other networks, or the weights with which networks
are averaged.
"""
