"""Search by meaning: passages and queries as vectors of a sentence model, in one thread and with numpy alone."""
