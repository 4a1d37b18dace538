"""draftco: GRPO with lossless speculative rollouts and a draft trained inside the policy's own update."""
