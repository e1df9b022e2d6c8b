"""The former names of modules, and of what moved between modules, since 0.2. 0.4 refuses them."""

MOVED = {
    "pipelines.cli.estimate_verb": "rlhf_contrib.planner.verb",
    "pipelines.cli.import_openrlhf": "rlhf_contrib.openrlhf.verb",
    "pipelines.cli.scaffold_verb": "rlhf_contrib.places.verb",
    "pipelines.cli.serve_reward": "rlhf_contrib.serve.reward_verb",
    "pipelines.cli.sweep_verb": "rlhf_contrib.sweep.verb",
    "pipelines.execution.estimate": "rlhf_contrib.planner.estimate",
    "pipelines.execution.hardware": "rlhf_contrib.planner.hardware",
    "pipelines.execution.job": "rlhf_contrib.ray_jobs.job",
    "pipelines.execution.ray_job": "rlhf_contrib.ray_jobs.executor",
    "pipelines.execution.stage_models": "rlhf_contrib.planner.stage_models",
    "pipelines.execution.sweep": "rlhf_contrib.sweep.points",
    "pipelines.flows.suites": "pipelines.flows.evaluation",
    "pipelines.importers.openrlhf": "rlhf_contrib.openrlhf",
    "rlhf_core.data.worlds": "rlhf_contrib.worlds",
    "rlhf_core.integrations.nemo_gym": "rlhf_contrib.environments.nemo_gym",
    "rlhf_core.integrations.openenv": "rlhf_contrib.environments.openenv",
    "rlhf_core.integrations.openrlhf": "rlhf_contrib.openrlhf.agent",
    "rlhf_core.integrations.program": "rlhf_core.agents.program",
    "rlhf_core.integrations.verifiers": "rlhf_contrib.environments.verifiers",
    "rlhf_core.integrations.verifiers_runner": "rlhf_contrib.environments.verifiers_runner",
    "rlhf_core.models.sizes": "rlhf_contrib.planner.sizes",
    "rlhf_core.rewards.library.code": "rlhf_contrib.sandbox.code",
    "rlhf_core.rewards.sandbox": "rlhf_contrib.sandbox",
    "rlhf_core.rewards.server": "rlhf_contrib.serve.reward_server",
    "rlhf_core.runtime.jobs": "rlhf_contrib.ray_jobs.jobs",
    "rlhf_core.sampling.vllm_server_sampler": "rlhf_contrib.vllm_server.sampler",
    "rlhf_core.store.checkpoints": "rlhf_core.stage.checkpoints",
    "rlhf_core.store.failures": "rlhf_core.stage.failures",
    "rlhf_core.store.gate_decisions": "rlhf_core.stage.gate_decisions",
    "rlhf_core.store.maintenance": "rlhf_core.store.collection",
    "rlhf_core.training.memory": "rlhf_contrib.planner.memory",
    "stages.config": "stages",
}
"""Former name of a module, or of a package with its modules -> the present one."""
EMPTIED = ("pipelines.importers", "rlhf_core.integrations")
"""Packages that have lost all of their modules."""
MOVED_NAMES = {
    "pipelines.cli.common": {"pipelines.execution.key_metric": "DROPPED KEY_METRICS key_metric metric_rank"},
    "pipelines.services.policy_server": {
        "rlhf_contrib.serve.policy_server": "LORA_RANKS SERVE_PORT ServeOptions ServedModel TEMPLATE check_served "
        "has_chat_template health_url policy_server serve_command serve_environment wait_for_end",
    },
    "rlhf_core.algorithms.policy.weighted": {"rlhf_core.algorithms.token_math": "LEAST"},
    "rlhf_core.config.engines": {
        "rlhf_core.config.models": "ALL_LINEAR BaseModelConfig GIVEN_TO_TEMPLATES InitModel PretrainedModel",
        "rlhf_core.config.runtime": "AnySamplerConfig HFSamplerConfig PoolConfig PoolRole RuntimeConfig SamplerConfig Url "
        "VllmSamplerConfig VllmServerSamplerConfig dtype_of_gpus",
    },
    "rlhf_core.config.policy": {"rlhf_core.config.exports": "refuse_exports"},
    "rlhf_core.data.chat": {"rlhf_core.data.pieces": "ANCHORS MARKS encode token_text"},
    "rlhf_core.models.loading": {"rlhf_core.models.materialize": "PAD_CANDIDATES materialize with_variables"},
    "rlhf_core.rewards.judge": {"rlhf_core.rewards.verdicts": "find_verdict"},
    "rlhf_core.store.attempts": {"rlhf_core.stage.context": "logged_steps"},
    "rlhf_core.store.collection": {
        "rlhf_core.store.roots": "Root forget_wait note_wait pin pins roots_of unpin",
    },
    "rlhf_core.store.fingerprint": {
        "rlhf_core.stage.code": "ALL_MODULES PLUMBING module_digests",
        "rlhf_core.user_code.syntax": "OUR_PACKAGES functions_of imported_names parse_source top_level_names",
    },
    "rlhf_core.store.index": {"rlhf_core.stage.code": "remembered_code"},
    "rlhf_core.store.records": {"rlhf_core.stage.versions": "environment other_versions versions"},
    "rlhf_core.tracking.mlflow_delivery": {"rlhf_core.tracking.outbox": "Outbox"},
    "rlhf_core.training.trainer": {
        "rlhf_core.training.skipped": "MAX_SKIPPED_IN_A_ROW check_updated count_skipped",
    },
    "rlhf_core.user_code.sources": {"rlhf_core.processes.installed": "installed_folders"},
    "stages.measured": {"stages.evaluate": "HEADLINES NO_BRACKETS POLICY_FIGURES POLICY_MEANS policy_numbers"},
}
"""Module -> modules that have names of it now -> these names. A stage's package also had the names of its module `run`."""
