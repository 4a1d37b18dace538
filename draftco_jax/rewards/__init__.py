"""Verifiers of responses, with the scorer that applies them to rollouts."""
