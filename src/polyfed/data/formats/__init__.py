"""Reading files: images, text, tables, data sets of the hub."""
