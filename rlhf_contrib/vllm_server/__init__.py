"""Sample with external `vllm serve` processes: `[runtime.sampler] type = "vllm_server"`."""
