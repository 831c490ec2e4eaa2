"""`cohort bench`: measured throughput, compared with what the hardware allows."""
