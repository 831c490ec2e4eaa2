"""What a person or a program sees of a run while it runs."""
