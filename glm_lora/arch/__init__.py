"""Facts about glm5_next (no torch): the model's shape, its parameters and their names."""
