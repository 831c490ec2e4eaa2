"""Tools that a model may call: their descriptions, the formats of calls, and how a call is run."""
