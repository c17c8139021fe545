"""Provides methods that train clients' networks to have similar representations: FedHeNN for one and for several
architectures.
"""
