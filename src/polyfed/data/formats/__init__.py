"""Reads file formats: images, text, IDX and Parquet files, and data sets of the Hugging Face hub."""
