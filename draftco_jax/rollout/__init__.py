"""Host side of rollouts: what is remembered of earlier ones."""
