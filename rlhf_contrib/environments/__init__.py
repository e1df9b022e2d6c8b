"""Play episodes in environments of other projects: OpenEnv, NeMo Gym, verifiers.

Each module defines `open_agent(config, tokenizer=, code=, notes=)`, and `SESSION`, the kind of session that plays the
result of `open_agent`. `rlhf_core.config.agent_modules` names the modules by the `type` of the agent.
"""
