"""Models: loading, heads, LoRA, forward passes and export. transformers and peft are imported inside functions."""
