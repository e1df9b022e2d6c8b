"""The modules that open the sessions of agents, by the `type` of the agent.

Sessions import one only when it is wanted: a module that talks over HTTP takes 0.3 s, and an environment starts in 0.5 s.
The options of all types are in `rlhf_core.config.agents`, so a profile is read without these modules.
"""

AGENT_MODULES = {
    "program": "rlhf_core.agents.program",
    "openrlhf": "rlhf_contrib.openrlhf.agent",
    "openenv": "rlhf_contrib.environments.openenv",
    "nemo_gym": "rlhf_contrib.environments.nemo_gym",
    "verifiers": "rlhf_contrib.environments.verifiers",
}
