"""Provides methods in which clients with their own networks share the mean representation of each class (its
prototype), or a common head.
"""
