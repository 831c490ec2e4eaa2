"""Stand-ins for the servers of vLLM and SGLang: their HTTP interfaces, with Cohort's decoder behind them.

They answer as the real ones do, wrong requests included. They can be told to misbehave (`faults`). What was read or
measured at the real servers stands beside the code that imitates it.
"""
