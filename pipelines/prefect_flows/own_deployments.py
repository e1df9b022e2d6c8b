"""Make a deployment of a user's own profile, whose form has four fields (`rlhf deploy`), and list existing ones."""

import asyncio
from collections.abc import Collection, Mapping
from typing import Any
from uuid import UUID

from prefect import Flow
from prefect.client.orchestration import PrefectClient, SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import DeploymentFilter
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect.client.schemas.schedules import CronSchedule
from prefect.deployments.runner import EntrypointType, RunnerDeployment
from prefect.exceptions import ObjectNotFound
from prefect.workers.process import ProcessWorker

from pipelines.execution.plan import DIGITS
from pipelines.flows.profile import PipelineConfig
from pipelines.prefect_flows.pipeline_flows import full
from pipelines.services.flow_runs import FLOW_NAME, OWN_TAG, PIPELINE_TAG, home_tag
from pipelines.services.home import Home
from rlhf_core.errors import ConfigError
from rlhf_core.processes.identity import user_name

FIELDS = ("overrides", "until", "seed", "force")
"""Fields of the form of an own deployment."""
ONE_AT_A_TIME = ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.ENQUEUE)
UNSCHEDULED = "none"


class Deployment(RunnerDeployment):
    """A deployment with the form that its flow has made: Prefect would compute it a second time, 0.1 s each."""

    def _set_defaults_from_flow(self: Any, flow: Flow[..., Any]) -> None:
        self._parameter_openapi_schema = flow.parameters
        self._version_from_flow = not self.version
        self.version = self.version or flow.version
        self.description = self.description or flow.description


def declare(flow: Flow[..., Any], name: str, parameters: dict[str, Any], *tags: str, **settings: Any) -> Any:
    """Declare a deployment that runs one flow at a time.

    Without `version` Prefect chooses one: of the code, or of git.
    """
    return Deployment.from_flow(
        flow,
        name,
        parameters=parameters,
        tags=list(tags),
        entrypoint_type=EntrypointType.MODULE_PATH,
        **{"concurrency_limit": ONE_AT_A_TIME} | settings,
    )


def claim(deployment: Any, home: Home) -> Any:
    """Add the tags of state folder and user to a deployment; its runs inherit them, and are ours before they start."""
    deployment.tags = [*deployment.tags, home_tag(home), f"user:{user_name()}"]
    return deployment


def of_kept_profile(name: str, digest: str, tags: Collection[str]) -> Any:
    """The deployment of a profile that this state folder keeps, and whose runs its services start."""
    made = declare(full, name, {"profile": digest}, PIPELINE_TAG, OWN_TAG, *tags, version=digest[:DIGITS])
    return claim(made, Home.here())


def in_pool(name: str, digest: str, table: Mapping[str, Any], pool: str, config: PipelineConfig) -> Any:
    """The deployment of a profile in a work pool, which is created if it does not exist.

    The profile is in its parameters, since workers may be anywhere. They start as many runs at a time as they have room
    for; the runs are of the user who has made the deployment.
    """
    asyncio.run(ensure_pool(pool))
    return declare(
        full,
        name,
        {"config": dict(table)},
        *(PIPELINE_TAG, OWN_TAG, f"user:{user_name()}", *config.project.tags),
        version=digest[:DIGITS],
        concurrency_limit=None,
        work_pool_name=pool,
        work_queue_name=config.deployments.priority,
        job_variables={"env": {"RLHF_USER": user_name()}},
    )


def make_deployment(made: Any, *, about: str, seed: int, stages: Collection[str], cron: str) -> tuple[UUID, str]:
    """Make or update a deployment of a profile; return its id, and the version that it had before, or "".

    A version is the beginning of a profile's digest. Without `cron` the schedule is unchanged; `none` removes it.
    """
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
        before = _before(client, made.name)
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
    """Id -> name of the deployments of profiles that this state folder has on the server."""
    tags = {"all_": [home_tag(Home.here()), OWN_TAG]}
    found = await client.read_deployments(deployment_filter=DeploymentFilter(tags=tags))
    return {one.id: one.name for one in found}


# ---------------------------------------------------------------- work pools

QUEUES = {"high": 1, "default": 2}
"""Work queues of a pool, by priority: runs of the first are started before runs of the others."""


async def ensure_pool(name: str) -> None:
    """Make a work pool of processes with its queues; an existing pool of any type gets the queues that it lacks.

    Raises ConfigError for a name that Prefect refuses.
    """
    async with get_client() as client:
        try:
            await client.read_work_pool(name)
        except ObjectNotFound:
            try:
                template = ProcessWorker.get_default_base_job_template()
                await client.create_work_pool(WorkPoolCreate(name=name, type="process", base_job_template=template))
            except ValueError:
                raise ConfigError("--pool", name, "is no name of a work pool", "use letters, digits, - and _") from None
        for queue, priority in QUEUES.items():
            await _ensure_queue(client, name, queue, priority)


async def _ensure_queue(client: PrefectClient, pool: str, name: str, priority: int) -> None:
    try:
        found = await client.read_work_queue_by_name(name, work_pool_name=pool)
    except ObjectNotFound:
        await client.create_work_queue(name, priority=priority, work_pool_name=pool)
    else:
        if name == "default" and found.priority < priority:  # as Prefect makes it; another one was set by a person
            await client.update_work_queue(found.id, priority=priority)
