"""Provide vLLM and Hugging Face samplers behind the `Sampler` protocol. Importing this package imports no engine."""
