"""`cohort check`: tests the update, the reward and the memory plan of a config on a few real prompts, before a run."""
