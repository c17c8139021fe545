"""Provides what methods of distillation share: base classes, losses, shared networks."""
