"""Samplers: vLLM and Hugging Face engines behind the `Sampler` protocol. Importing this package imports no engine."""
