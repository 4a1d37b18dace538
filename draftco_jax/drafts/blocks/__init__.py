"""What DFlash and DSpark share: a draft that fills a block of tokens in one pass. Not a family of its own."""
