"""Numerics shared by all rooms: laws over tokens, their log-probs, masked sums."""
