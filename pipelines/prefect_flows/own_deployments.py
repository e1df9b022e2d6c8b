"""Make a deployment of a user's own profile, whose form has four fields (`rlhf deploy`), and find those of a state folder."""

from collections.abc import Collection
from typing import Any
from uuid import UUID

from prefect import Flow
from prefect.client.orchestration import PrefectClient, SyncPrefectClient, get_client
from prefect.client.schemas.filters import DeploymentFilter
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect.client.schemas.schedules import CronSchedule
from prefect.deployments.runner import EntrypointType
from prefect.exceptions import ObjectNotFound

from pipelines.execution.plan import DIGITS
from pipelines.prefect_flows.pipeline_flows import full
from pipelines.services.flow_runs import FLOW_NAME, OWN_TAG, PIPELINE_TAG, home_tag
from pipelines.services.home import Home
from rlhf_core.errors import ConfigError
from rlhf_core.processes.identity import user_name

FIELDS = ("overrides", "until", "seed", "force")
"""Fields of the form of an own deployment."""
ONE_AT_A_TIME = ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.ENQUEUE)
UNSCHEDULED = "none"


def declare(flow: Flow[..., Any], name: str, parameters: dict[str, Any], *tags: str, version: str | None = None) -> Any:
    """Return a deployment that runs one flow at a time. Without `version` Prefect chooses one: of the code, or of git."""
    return flow.to_deployment(
        name,
        parameters=parameters,
        tags=list(tags),
        version=version,
        concurrency_limit=ONE_AT_A_TIME,
        entrypoint_type=EntrypointType.MODULE_PATH,
    )


def claim(deployment: Any) -> Any:
    """Return a deployment with the tags of state folder and user; its runs inherit them, and are ours before they start."""
    deployment.tags = [*deployment.tags, home_tag(Home.here()), f"user:{user_name()}"]
    return deployment


def deploy(
    name: str, digest: str, *, about: str, seed: int, stages: Collection[str], cron: str, tags: Collection[str] = ()
) -> tuple[UUID, str]:
    """Make or update the deployment of a kept profile; return its id, and the version that it had before, or "".

    A version is the beginning of a profile's digest. Without `cron` the schedule stays as it is; `none` removes it.
    """
    made = claim(declare(full, name, {"profile": digest}, PIPELINE_TAG, OWN_TAG, *tags, version=digest[:DIGITS]))
    made.description = about
    form = made._parameter_openapi_schema.model_copy(deep=True)
    form.properties = {field: form.properties[field] for field in FIELDS}
    place, said = form.properties["seed"]["position"], f"Seed of the run. If empty, {seed}."
    # Without a default, and as a number alone: for `int | None` Prefect's page asks for the type first.
    form.properties["seed"] = {"title": "seed", "type": "integer", "description": said, "position": place}
    for field in ("until", "force"):
        form.properties[field]["description"] += f" This profile has {', '.join(stages)}."
    made._parameter_openapi_schema = form
    with get_client(sync_client=True) as client:
        before = _before(client, name)
        schedules = [] if cron in ("", UNSCHEDULED) else [{"schedule": _schedule(cron), "slug": "rlhf-deploy"}]
        found = made.apply(schedules=schedules)
        if cron == UNSCHEDULED:
            for one in client.read_deployment_schedules(found):
                client.delete_deployment_schedule(found, one.id)
    return found, before


def _before(client: SyncPrefectClient, name: str) -> str:
    try:
        found = client.read_deployment_by_name(f"{FLOW_NAME}/{name}")
    except ObjectNotFound:
        return ""
    if OWN_TAG not in found.tags:
        raise ConfigError("--name", name, "is a deployment of rlhf itself", "choose another name")
    return found.version or ""


def _schedule(cron: str) -> CronSchedule:
    try:
        return CronSchedule(cron=cron, timezone="UTC")
    except ValueError:
        rule = "is not a cron expression of five fields"
        raise ConfigError("--cron", cron, rule, "for example '0 2 * * *', every night at 2:00 UTC") from None


async def own_deployments(client: PrefectClient) -> dict[UUID, str]:
    """Return id -> name of the deployments of profiles that this state folder has on the server."""
    tags = {"all_": [home_tag(Home.here()), OWN_TAG]}
    found = await client.read_deployments(deployment_filter=DeploymentFilter(tags=tags))
    return {one.id: one.name for one in found}
