"""Defines and checks what the class of a method says about itself: its card, words, capabilities and parts."""
