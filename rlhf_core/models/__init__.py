"""Load, run and export models with heads and LoRA adapters. transformers and peft are imported inside functions."""
