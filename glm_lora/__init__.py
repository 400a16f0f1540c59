"""glm-lora: LoRA adapters for GLM-5.3-Flash, trained with reinforcement learning."""

__version__ = "0.1.0"
