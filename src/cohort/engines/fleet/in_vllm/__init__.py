"""Code that runs inside a vLLM server which Cohort starts, in vLLM's own environment: without Cohort's packages."""
