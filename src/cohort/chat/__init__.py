"""Chat in a terminal with one model or several side by side (`cohort chat`)."""
