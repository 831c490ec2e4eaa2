"""Configs: typed settings of a run, their rules, and how they are read from files and flags and written."""
