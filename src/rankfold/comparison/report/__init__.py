"""The report of a comparison: table, pictures, page."""
