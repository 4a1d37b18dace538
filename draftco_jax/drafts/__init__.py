"""Draft models: one folder per family, found through one catalog."""
