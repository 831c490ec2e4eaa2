"""`cohort bench`: throughput beside what the hardware allows."""
