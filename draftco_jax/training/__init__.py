"""Training: optimizer groups, state, the joint update of policy and draft, fine-tuning on demonstrations."""
