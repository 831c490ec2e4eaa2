"""Jobs: what is trained in a run. One module per kind of run; `cohort.jobs.build` makes them from a config."""
