"""The glm5_next text model for training, on megatron-core's process groups."""
