"""Why a step did what it did, from its run directory alone: no model is loaded."""
