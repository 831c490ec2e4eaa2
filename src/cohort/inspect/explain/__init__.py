"""`cohort explain`: the groups of a step and what was done with them, from the run directory, without a model."""
