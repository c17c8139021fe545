"""Defines the messages between a server and its sites: their encoding, the handshake that begins a run, and summaries
of tables.
"""
