"""Play episodes of other programs: any command, and environments of OpenEnv, NeMo Gym and verifiers.

Each module defines `open_agent(config, tokenizer=, code=, notes=)` and `SESSION`, the kind of session that plays what it
returns. `rlhf_core.config.agent_modules` names the modules by the `type` of the agent.
"""
