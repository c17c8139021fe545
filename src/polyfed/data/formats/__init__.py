"""Reads files: images, text, tables, data sets of the Hugging Face hub."""
