"""DSpark (arXiv 2607.05147): a block as in DFlash, drawn in order under a low-rank bias, with a confidence head."""
