"""Triton kernels behind the CUDA paths; imported only where ``glm_lora.model.fast`` allows it."""
