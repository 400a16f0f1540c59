"""Data, rewards, advantages and losses."""
