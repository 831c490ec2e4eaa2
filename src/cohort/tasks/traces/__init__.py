"""Synthetic conversations for supervised fine-tuning: sums, Countdown and a calculator, decided by a seed."""
