"""Reading checkpoints, converting them, and saving training state."""
