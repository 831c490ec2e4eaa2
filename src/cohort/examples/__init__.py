"""Examples: rows of files become conversations to imitate, and pairs of answers to compare."""
