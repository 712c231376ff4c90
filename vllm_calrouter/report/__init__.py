"""A folder of runs as one HTML page."""
