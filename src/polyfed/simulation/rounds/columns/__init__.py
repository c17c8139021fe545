"""Describes and preprocesses the columns of all sites' tables by messages, in rounds of their own."""
