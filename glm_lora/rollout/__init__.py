"""Engines that sample from base plus adapter."""
