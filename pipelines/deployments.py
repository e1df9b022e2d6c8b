"""What `rlhf up` serves: `rlhf-pipeline/full`, `/rlvr`, and one deployment per stage, each with a typed form."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from prefect import Flow
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect.deployments.runner import EntrypointType
from prefect.runner import Runner
from pydantic import BaseModel

from pipelines import flows, single_stage
from pipelines.profile import PipelineConfig, load_profile
from pipelines.reconcile import reconcile

ONE_AT_A_TIME = ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.ENQUEUE)
RUNS_AT_ONCE = 1
"""Two runs would each start a Ray of their own, on the same cores and GPUs; the second waits and then finds hits."""
POLL_S = 2.0


def deployments() -> list[Any]:
    """Return the deployments; their forms are filled from the tiny profiles, so that each runs as it is."""
    profile = load_profile("tiny/full")
    stage_flows = stage_parameters(profile)
    return [
        _deploy(flows.full, "full", {"config": _plain(profile)}),
        _deploy(flows.rlvr, "rlvr", {"config": _plain(load_profile("tiny/rlvr"))}),
        *(_deploy(flow, name, parameters) for name, (flow, parameters) in stage_flows.items()),
    ]


def stage_parameters(profile: PipelineConfig) -> dict[str, tuple[Flow[..., Any], dict[str, Any]]]:
    """Return deployment name -> flow and the parameters that its form starts with."""
    rejection, dpo, judged = profile.rejection_sampling, profile.iterative_dpo, profile.evaluate
    settings = {"name": profile.name, "seed": profile.seed, "runtime": _plain(profile.runtime)}
    sections: dict[str, tuple[Flow[..., Any], BaseModel | None]] = {
        "prepare-data": (single_stage.prepare_data, profile.prepare_data),
        "sft": (single_stage.sft, profile.sft),
        "reward-model": (single_stage.reward_model, profile.reward_model),
        "generate": (single_stage.generate, rejection and rejection.generate),
        "score": (single_stage.score, rejection and rejection.score),
        "select": (single_stage.select, rejection and rejection.select),
        "rejection-sampling": (single_stage.rejection_sampling, rejection),
        "iterative-dpo": (single_stage.iterative_dpo, dpo),
        "dpo": (single_stage.dpo, dpo and dpo.dpo),
        "ppo": (single_stage.ppo, profile.ppo),
        "evaluate": (single_stage.evaluate, judged and judged.evaluate),
        "publish": (single_stage.publish, profile.publish),
    }
    parameters: dict[str, tuple[Flow[..., Any], dict[str, Any]]] = {}
    for name, (flow, section) in sections.items():
        if section is not None:
            config = section.model_dump(
                mode="json", exclude_none=True, exclude={"start_from"} if name == "ppo" else None
            )
            parameters[name] = (flow, {"config": config, "settings": settings})
    return parameters


def _deploy(flow: Flow[..., Any], name: str, parameters: dict[str, Any]) -> Any:
    return flow.to_deployment(
        name,
        parameters=parameters,
        description=flow.description,
        concurrency_limit=ONE_AT_A_TIME,
        entrypoint_type=EntrypointType.MODULE_PATH,
    )


def _plain(config: BaseModel) -> dict[str, Any]:
    return config.model_dump(mode="json", exclude_none=True)


def main(ready: Path) -> None:
    """Serve the deployments; the file `ready` appears when they can be triggered."""
    reconcile()
    runner = Runner(limit=RUNS_AT_ONCE, query_seconds=POLL_S)
    for deployment in deployments():
        runner.add_deployment(deployment)
    ready.touch()
    asyncio.run(runner.start())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
