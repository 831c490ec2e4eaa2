"""Synthetic conversations to imitate: sums, Countdown and a calculator, as a function of a seed."""
