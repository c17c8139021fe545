"""Dividing a data set among clients, and a client's examples into training, validation and test sets."""
