"""Tasks the policy is trained on."""
