"""DFlash (z-lab): all tokens of a block in one pass, from fused features of the policy."""
