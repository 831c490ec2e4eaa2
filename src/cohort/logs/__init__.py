"""Output of a run while it trains: views for people and programs, and sinks for other programs."""
