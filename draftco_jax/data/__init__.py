"""Prompts on their way in, training rows on their way out."""
