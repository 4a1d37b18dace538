"""Models of what an update costs, from configs alone."""
