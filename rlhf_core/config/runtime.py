"""Configure samplers, and the runtime in which the engines of a run work."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    FieldSerializationInfo,
    ValidatorFunctionWrapHandler,
    field_serializer,
    field_validator,
    model_validator,
)

from rlhf_core.by_path import is_path, named
from rlhf_core.config.engines import BaseSamplerConfig, DType, EngineNeeds, Precision, TrainerConfig
from rlhf_core.errors import ConfigError
from rlhf_core.schema.base import LONGEST_S, OPERATIONAL, Config, Seconds, added_option, http_address
from rlhf_core.schema.secrets import HOLDS_SECRETS

Url = Annotated[str, Field(pattern=r"^https?://[^/?#]+$"), AfterValidator(http_address)]
"""Address of a server, without a path."""


class VllmSamplerConfig(BaseSamplerConfig):
    """vLLM engines, each a Ray actor."""

    module: ClassVar[str] = "rlhf_core.sampling.vllm_sampler"
    type: Literal["vllm"] = "vllm"
    dtype: DType = "float32"
    """Precision of sampling; `auto` as in `trainer.dtype`."""
    fp32_lm_head: bool = added_option(False)
    """As `trainer.fp32_lm_head`, and to be set with it; vLLM's `head_dtype`."""
    max_model_len: int = Field(256, ge=16)
    tensor_parallel: Annotated[int, Field(ge=1), OPERATIONAL] = 1
    engines: Annotated[int, Field(ge=1), OPERATIONAL] = 1
    """Number of processes that sample, each with the weights, a KV cache and, on CPU, an equal share of the cores. On a
    few cores, engines of one thread are faster than one of several: much of a step is Python, which uses one core."""
    max_num_seqs: Annotated[int, Field(ge=1), OPERATIONAL] = 256
    kv_cache_gib: Annotated[float, Field(gt=0), OPERATIONAL] = 1.0
    """Size of the KV cache in GiB, on CPU only."""
    gpu_memory_fraction: Annotated[float, Field(gt=0, le=1), OPERATIONAL] = 0.5
    enforce_eager: Annotated[bool, OPERATIONAL] = True
    prefix_caching: bool = False
    """Whether common prefixes of prompts are computed once per version of the weights, which speeds up groups and turns
    of episodes. The cached tokens depend on earlier sampling, so a restart is no longer bitwise the same."""
    sleep: Annotated[bool, OPERATIONAL] = False
    """Whether an engine that shares its GPU with a train worker frees the memory of its weights and its KV cache while a
    model trains, and takes it back to sample."""
    lora_sync: Literal["merged", "adapter"] = added_option("merged")
    """How an engine receives a policy that trains adapters: all weights, with the adapters `merged`, or each `adapter`
    alone, which it adds to the products of its weights. Results differ by rounding."""
    max_lora_rank: Annotated[Literal[1, 8, 16, 32, 64, 128, 256, 320, 512], OPERATIONAL] = added_option(16)
    """Largest rank of the adapters, for which an engine with `lora_sync = "adapter"` keeps room."""
    routed_experts: bool = added_option(False)
    """Whether engines record the experts of each token, for `ppo.router_replay`. Dense models are refused."""

    def records_experts(self) -> bool:
        return self.routed_experts

    def needs(self) -> EngineNeeds:
        """`engines` processes of `tensor_parallel` GPUs each, which take weights from GPU to GPU, or adapters alone."""
        alone = self.lora_sync == "adapter"
        return EngineNeeds(
            self.engines, self.tensor_parallel, sleeps=self.sleep, device_transfer=not alone, adapters=alone
        )


class VllmServerSamplerConfig(BaseSamplerConfig):
    """External `vllm serve` processes (`rlhf_contrib.vllm_server.sampler` lists the options they need)."""

    module: ClassVar[str] = "rlhf_contrib.vllm_server.sampler"
    type: Literal["vllm_server"] = "vllm_server"
    urls: Annotated[tuple[Url, ...], Field(min_length=1), OPERATIONAL, HOLDS_SECRETS]
    """Servers of the same policy, e.g. `["http://node-1:8000"]`; requests go to the one with the fewest. Write a
    secret in an address as `${env:NAME}`."""
    weights_folder: Annotated[str, Field(min_length=1), OPERATIONAL]
    """Folder for weight transfer, which the servers and this run see under the same absolute path."""
    token_env: Annotated[str, OPERATIONAL, HOLDS_SECRETS] = ""
    """Environment variable with the servers' `--api-key`."""
    dtype: Precision = "float32"
    """Precision with which the servers were started."""
    fp32_lm_head: bool = added_option(False)
    """As `trainer.fp32_lm_head`: whether the servers were started with `--hf-overrides '{"head_dtype": "float32"}'`."""
    max_model_len: int = Field(256, ge=16)
    request_timeout_s: Annotated[Seconds, OPERATIONAL] = 300.0
    """Deadline, in seconds, of one completion, including the wait in the server's queue."""
    load_timeout_s: Annotated[Seconds, OPERATIONAL] = 300.0
    """Deadline, in seconds, of one weight update on all servers."""
    retries: Annotated[int, Field(ge=0), OPERATIONAL] = 2
    """Number of retries of a failed request, on another server if there is one."""
    max_in_flight: Annotated[int, Field(ge=1), OPERATIONAL] = 256
    """Maximum number of concurrent requests per server."""

    @field_validator("weights_folder")
    @classmethod
    def _check_absolute_path(cls, folder: str) -> str:
        if not folder.startswith("/"):
            raise ValueError("must be an absolute path, because servers resolve it too; start it with /")
        return folder


class HFSamplerConfig(BaseSamplerConfig):
    """Generation with plain transformers, for tests and machines without vLLM; never chosen silently."""

    module: ClassVar[str] = "rlhf_core.sampling.hf_sampler"
    type: Literal["hf"] = "hf"
    dtype: DType = "float32"
    """Precision of sampling; `auto` as in `trainer.dtype`."""
    fp32_lm_head: bool = added_option(False)
    """As `trainer.fp32_lm_head`, and to be set with it."""
    batch_size: Annotated[int, Field(ge=1), OPERATIONAL] = 32

    def records_experts(self) -> bool:
        return True


AnySamplerConfig = (
    VllmSamplerConfig
    | VllmServerSamplerConfig
    | HFSamplerConfig
)  # fmt: skip
"""The samplers, one per line; `runtime.sampler.type` selects one."""
SamplerConfig = Annotated[AnySamplerConfig, Field(discriminator="type")]


# ---------------------------------------------------------------- runtime


EXECUTORS = {"ray-job": "rlhf_contrib.ray_jobs.executor:RayJobExecutor"}
"""Executor by name -> the class that `pipelines.execution.opening` calls with the context of a run."""
ClassPath = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
"""A class of a module that can be imported, `package.module:NAME`."""
PoolRole = Literal["reference", "value_model", "reward_model", "teacher"]
"""The models that may have separate train workers. The policy may not, because its workers send the weights to the
engines."""


def own_sampler(path: str) -> type[BaseSamplerConfig]:
    """The configuration class of a sampler that a profile names by path. Raises ValueError if it is none."""
    found = named(path)
    if not (isinstance(found, type) and issubclass(found, BaseSamplerConfig)):
        base = f"{BaseSamplerConfig.__module__}.{BaseSamplerConfig.__name__}"
        raise ValueError(f"type = {path!r}: must be a subclass of {base}; see docs/add_a_sampler.md")
    return found


class PoolConfig(Config):
    """Separate train workers for some models of a stage, which then compute at the same time as the others."""

    workers: Annotated[int, Field(ge=1), OPERATIONAL] = 1
    gpus_per_worker: Annotated[float, Field(ge=0, le=1), OPERATIONAL] = 0
    """Number of GPUs per worker, which no engine shares."""
    roles: Annotated[tuple[PoolRole, ...], Field(min_length=1), OPERATIONAL]
    """The models that they hold."""
    zero_stage: Annotated[Literal[0, 1, 2, 3] | None, OPERATIONAL] = None
    """ZeRO stage of these models; None uses the stage of `runtime.trainer`, and likewise below."""
    micro_batch: Annotated[int | None, Field(ge=1), OPERATIONAL] = None
    micro_tokens: Annotated[int | None, Field(ge=0), OPERATIONAL] = None


class RuntimeConfig(Config):
    """The place where engines run. `ray` starts a local Ray or joins `RAY_ADDRESS`; `local` is this process (tests)."""

    type: Annotated[Literal["ray", "local"], OPERATIONAL] = "ray"
    train_workers: Annotated[int, Field(ge=1), OPERATIONAL] = 1
    gpus_per_train_worker: Annotated[float, Field(ge=0, le=1), OPERATIONAL] = 0
    """Number of GPUs per train worker; 0 trains on CPUs. If it and `gpus_per_engine` are fractions with a sum of at
    most 1, a train worker and an engine share a GPU; two train workers or two engines never do."""
    gpus_per_engine: Annotated[float, Field(ge=0), OPERATIONAL] = 0
    """Number of GPUs per engine: whole GPUs, as many as `sampler.tensor_parallel`, or a fraction, which it has of each of
    its GPUs; 0 samples on CPUs."""
    cpu_threads: Annotated[int, Field(ge=0), OPERATIONAL] = 0
    """Number of threads per worker; 0 is an equal share of the cores that the run may use. Results depend on it by
    rounding."""
    worker_timeout_s: Annotated[Seconds, OPERATIONAL] = 600.0
    """Deadline, in seconds, of one call to a worker."""
    retries: Annotated[int, Field(ge=0), OPERATIONAL] = 2
    """Number of times a stage that lost its workers resumes in the same run without making progress."""
    execution: Annotated[Literal["inline", "ray-job"] | ClassPath, OPERATIONAL] = "inline"
    """Where stages run: `inline` in the flow's process; `ray-job` as jobs of the Ray at `RAY_ADDRESS`, which continue
    if the flow dies, and to which the next run attaches; or a class of your own, `package.module:Class`
    (docs/contrib.md)."""
    job_pending_timeout_s: Annotated[Seconds, OPERATIONAL] = 300.0
    """Time, in seconds, that a job may wait for the cluster before the run gives up."""
    placement_timeout_s: Annotated[Seconds, OPERATIONAL] = 300.0
    """Time, in seconds, that workers may wait for GPUs that are busy or, in a cluster of `RAY_ADDRESS`, not there yet:
    an autoscaler starts nodes for waiting workers."""
    time_limit_s: Annotated[float, Field(ge=0, le=LONGEST_S), OPERATIONAL] = 0.0
    """Time, in seconds after the start of the allocation (`SLURM_JOB_START_TIME`, else of the run), at which stages
    save and the run ends; leave room for one step and one checkpoint. 0 sets no limit."""
    trainer: TrainerConfig = TrainerConfig()
    sampler: SamplerConfig = VllmSamplerConfig()
    pools: Annotated[dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w-]*$")], PoolConfig], OPERATIONAL] = (
        added_option({})
    )
    """Train workers of some models alone, by a name of your choice. All others share the `train_workers`."""

    def check_router_replay(self, key: str) -> None:
        """Raise ConfigError, naming `key`, if the sampler does not record experts or the trainer cannot replay them."""
        if not self.sampler.records_experts():
            rule = f"the sampler ({self.sampler.type}) does not record experts"
            raise ConfigError(key, True, rule, 'set runtime.sampler.routed_experts = true (type "vllm"), or use "hf"')
        if self.trainer.sequence_parallel > 1:
            rule = "train workers that share rows (runtime.trainer.sequence_parallel) cannot replay experts"
            raise ConfigError(key, True, rule, "set one of them to its default")

    def of(self, role: str) -> Self:
        """The configuration of the workers of one role: its pool's, as if it were the only one."""
        return self.in_pool(self.pool_of(role))

    def pool_of(self, role: str) -> str:
        """The name of the pool that has a role, "" for the workers of all others."""
        return next((name for name, pool in self.pools.items() if role in pool.roles), "")

    def in_pool(self, name: str) -> Self:
        """The configuration of the workers of one pool, as if they were the only ones."""
        if not name:
            return self
        pool = self.pools[name]
        own = {key: getattr(pool, key) for key in ("zero_stage", "micro_batch", "micro_tokens")}
        trainer = {key: value for key, value in own.items() if value is not None} | {"sleep": False}
        workers = {"train_workers": pool.workers, "gpus_per_train_worker": pool.gpus_per_worker, "pools": {}}
        return self.model_copy(update=workers | {"trainer": self.trainer.model_copy(update=trainer)})

    @property
    def executor_path(self) -> str:
        """Module and name of the class that executes stages; "" for `inline`."""
        return "" if self.execution == "inline" else EXECUTORS.get(self.execution, self.execution)

    @property
    def shares_gpus(self) -> bool:
        """Whether a train worker and an engine share each GPU."""
        return 0 < self.gpus_per_train_worker < 1 and 0 < self.gpus_per_engine < 1

    @property
    def lends_gpus(self) -> bool:
        """Whether engines of several GPUs share each of them with a train worker."""
        return self.shares_gpus and self.sampler.needs().tensor_parallel > 1

    @field_validator("sampler", mode="wrap")
    @classmethod
    def _read_own_sampler(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        """Read the table of a sampler, named by its path, with that sampler's class."""
        if isinstance(value, Mapping) and is_path(value.get("type")):
            return own_sampler(value["type"]).model_validate(value)
        return value if isinstance(value, BaseSamplerConfig) else handler(value)

    @field_serializer("sampler", mode="wrap")
    def _write_own_sampler(self, value: Any, handler: Any, info: FieldSerializationInfo) -> Any:
        if is_path(value.type):
            return value.model_dump(mode=info.mode, exclude_none=info.exclude_none)
        return handler(value)

    @model_validator(mode="before")
    @classmethod
    def _resolve_gpu_dtypes(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        gpus = {"trainer": data.get("gpus_per_train_worker"), "sampler": data.get("gpus_per_engine")}
        return {**data, **{name: dtype_of_gpus(data[name], gpus[name]) for name in gpus if name in data}}

    @model_validator(mode="after")
    def _check_gpus(self) -> Self:
        train, engine = self.gpus_per_train_worker, self.gpus_per_engine
        if self.shares_gpus and round(train + engine, 4) > 1:
            raise ValueError(
                f"gpus_per_train_worker, gpus_per_engine = {train:g}, {engine:g}: a train worker and an engine with "
                "fractions share one GPU, and their sum is more than 1; make it at most 1, or set both to 1"
            )
        if engine > 1 and engine != int(engine):
            raise ValueError(
                f"gpus_per_engine = {engine:g}: above 1 it must be a whole number; use a whole number, or a fraction below 1"
            )
        needs = self.sampler.needs()
        parallel = needs.tensor_parallel
        if self.lends_gpus:
            if self.train_workers != needs.engines * parallel:
                raise ValueError(
                    f"train_workers = {self.train_workers}: engines of several GPUs share each of them with a train worker, and "
                    f"{needs.engines} engines of {parallel} GPUs have {needs.engines * parallel}; set it to that"
                )
        elif parallel > max(1.0, engine) and (train > 0 or engine > 0):
            raise ValueError(
                f"sampler.tensor_parallel = {parallel}: runtime.gpus_per_engine = {engine:g} is smaller; give each engine as "
                "many GPUs, or share all of them with train workers (fractions for both)"
            )
        return self

    @model_validator(mode="after")
    def _check_head_precision(self) -> Self:
        # A sampler without these options samples in float32.
        dtype = getattr(self.sampler, "dtype", "float32")
        heads = self.trainer.fp32_lm_head, getattr(self.sampler, "fp32_lm_head", False)
        if self.trainer.dtype == dtype == "bfloat16" and heads[0] != heads[1]:
            raise ValueError(
                f"trainer.fp32_lm_head, sampler.fp32_lm_head = {heads[0]}, {heads[1]}: with one head in float32, the "
                "log-probabilities of the two differ more than with none; set both"
            )
        return self

    @model_validator(mode="after")
    def _check_sleep(self) -> Self:
        shares = self.type == "ray" and self.shares_gpus
        if self.trainer.sleep and not shares:
            raise ValueError(
                f"trainer.sleep = true: gpus_per_train_worker = {self.gpus_per_train_worker:g} on {self.type}, and only a "
                "train worker that shares a GPU with an engine has memory to give to it; set it to false, or "
                "gpus_per_train_worker and gpus_per_engine to fractions of one GPU"
            )
        if self.sampler.needs().sleeps and not shares:
            raise ValueError(
                f"sampler.sleep = true: gpus_per_engine = {self.gpus_per_engine:g} on {self.type}, and only an engine that "
                "shares a GPU with a train worker has memory to give back (vLLM cannot sleep on CPU); set it to false, or "
                "gpus_per_engine and gpus_per_train_worker to fractions of one GPU"
            )
        return self

    @model_validator(mode="after")
    def _check_pools(self) -> Self:
        held = [role for pool in self.pools.values() for role in pool.roles]
        for name, pool in self.pools.items():
            twice = next((role for role in pool.roles if held.count(role) > 1), None)
            if twice:
                raise ValueError(f"pools.{name}.roles = {twice!r}: another pool has it, too; leave it in one of them")
            if (pool.gpus_per_worker > 0) != (self.gpus_per_train_worker > 0):
                raise ValueError(
                    f"pools.{name}.gpus_per_worker = {pool.gpus_per_worker:g}: gpus_per_train_worker = "
                    f"{self.gpus_per_train_worker:g}, and all models are in the same kind of memory; give both GPUs or none"
                )
            trainer = self.in_pool(name).trainer
            if pool.workers % trainer.ranks_per_share != 0:
                raise ValueError(
                    f"pools.{name}.workers = {pool.workers}: trainer.sequence_parallel, tensor_parallel = "
                    f"{trainer.sequence_parallel}, {trainer.tensor_parallel} do not divide it; use a multiple"
                )
            TrainerConfig.model_validate(trainer.model_dump())  # a ZeRO stage that the pool's parallelism refuses
        return self

    @model_validator(mode="after")
    def _check_workers(self) -> Self:
        if self.train_workers % self.trainer.ranks_per_share != 0:
            raise ValueError(
                f"trainer.sequence_parallel, tensor_parallel = {self.trainer.sequence_parallel}, "
                f"{self.trainer.tensor_parallel}: does not divide train_workers = {self.train_workers}; use a divisor"
            )
        return self


def dtype_of_gpus(table: Any, gpus: Any) -> Any:
    """Replace a `dtype` of `auto` in `table` by bfloat16 if it computes on GPUs, with any processor that plans the run.

    `gpus` is the value in the profile; validation refuses it if it is no number.

    >>> dtype_of_gpus({"dtype": "auto"}, 0.5)
    {'dtype': 'bfloat16'}
    """
    uses = isinstance(gpus, (int, float)) and gpus > 0
    if isinstance(table, Mapping) and table.get("dtype") == "auto" and uses:
        return {**table, "dtype": "bfloat16"}
    return table
