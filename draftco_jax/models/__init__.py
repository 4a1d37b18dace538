"""Target policies: shared layers, one decoder, one file per family."""
