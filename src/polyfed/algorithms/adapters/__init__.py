"""Provides methods that train low-rank adapters (LoRA) and send one of an adapter's two factors."""
