"""Makes clients from the rows of large tables, or from their ids, one client at a time."""
