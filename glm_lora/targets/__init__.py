"""Target selection (no torch): from patterns to one frozen ``Selection``."""
