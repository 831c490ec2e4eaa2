"""Sandbox: runs programs that a model wrote, in namespaces of their own, under limits. See `run`."""

from __future__ import annotations

from cohort.sandbox.records import ProgramLimits, ProgramResult
from cohort.sandbox.run import call_functions, find_missing, forbid, run_program, set_mode

__all__ = [
    "ProgramLimits",
    "ProgramResult",
    "call_functions",
    "find_missing",
    "forbid",
    "run_program",
    "set_mode",
]
