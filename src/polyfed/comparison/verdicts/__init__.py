"""Answers in sentences whether a client should join the federation, and estimates the gains on which the answers rest."""
