"""Jobs: what a run does, one module per kind, on the parts that `cohort.jobs.build` puts together."""
