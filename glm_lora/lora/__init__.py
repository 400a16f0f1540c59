"""Native LoRA on the selected projections."""
