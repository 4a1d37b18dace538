"""Devices as one mesh: the names of its axes, and which of them each dim of a parameter is split over."""
