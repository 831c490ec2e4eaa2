"""The one boundary where foreign code runs: graders, in worker processes that can be killed. See `pool`."""
