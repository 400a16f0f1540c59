"""Writing adapters for PEFT and SGLang, and reading them back."""
