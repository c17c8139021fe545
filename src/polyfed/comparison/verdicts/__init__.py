"""Answers in sentences, and what they rest on."""
