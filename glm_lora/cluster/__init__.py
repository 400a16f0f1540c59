"""Ray and torchrun drivers around the same loop."""
