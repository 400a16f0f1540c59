"""Sending the adapter to the engines, and checking that it arrived."""
