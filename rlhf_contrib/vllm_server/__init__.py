"""Sample with `vllm serve` processes of others: `[runtime.sampler] type = "vllm_server"`."""
