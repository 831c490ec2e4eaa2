"""The 25 verifiable instructions of IFEval: their checks, and texts that follow them."""
