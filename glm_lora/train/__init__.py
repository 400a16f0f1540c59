"""The training worker and its step."""
