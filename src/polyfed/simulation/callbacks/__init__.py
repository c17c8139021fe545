"""Holds callbacks, objects that follow a run round by round: built-in ones evaluate, save checkpoints, log or stop;
users add more.
"""
