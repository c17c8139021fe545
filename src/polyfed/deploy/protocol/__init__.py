"""Encodes what a server and its sites exchange: envelopes, the handshake, summaries of tables."""
