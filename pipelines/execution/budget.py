"""Keep a run within its budget of hours, GPU hours and cost, over all attempts until it finishes.

The amounts spent by the attempts of a run are kept in the store, under the name of the run, until the run finishes. A
process that is killed does not record the amount that its last stage had spent.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from pipelines.flows.run_rules import BudgetConfig
from rlhf_core.config.runtime import RuntimeConfig
from rlhf_core.errors import ConfigError, readable
from rlhf_core.stage import stopping
from rlhf_core.stage.key import StageSpec
from rlhf_core.stage.stopping import RunOverBudget, StageStopped
from rlhf_core.store.fingerprint import sha256_text
from rlhf_core.store.protocol import Store, discard, update
from rlhf_core.store.typed_json import Stored, stored_in
from stages.propose_comparisons import ProposeComparisonsConfig

HOUR = 3600.0  # in seconds
SPENT = "the budget is spent"
UNITS = {"hours": "hours are spent", "gpu_hours": "GPU hours are spent", "cost": "is what the hours so far have cost"}


class Ledger(Stored):
    """Seconds spent by the attempts of a run; the cost is computed from the current prices."""

    run: str
    seconds: float = 0.0
    gpu_seconds: float = 0.0


@dataclass
class Spent:
    """Whether the time inside a block counts; it does not where another process computed the stage."""

    counts: bool = True


@dataclass
class Budget:
    """The budget of one run, whose ledger is in `store`."""

    config: BudgetConfig
    run: str
    store: Store
    clock: Callable[[], float] = time.monotonic
    _ledger: Ledger = field(init=False)

    def __post_init__(self) -> None:
        self._ledger = stored_in(self.store.recent(self._name), Ledger) or Ledger(run=self.run)

    def check(self) -> None:
        """Raise RunOverBudget if a part of the budget is spent."""
        for key, spent, limit in self._limits():
            if spent >= limit:
                raise RunOverBudget(
                    f"budget.{key} = {limit:g}: {readable(spent, 3)} {UNITS[key]}; "
                    f"finished work is kept: run the same command again with a higher budget.{key}"
                )

    @contextmanager
    def spending(self, gpus: float) -> Iterator[Spent]:
        """Count the time inside the block, on `gpus` GPUs; a stage in it saves and ends when the budget is spent.

        Raises RunOverBudget if the budget is spent at the beginning, or if the stage was stopped for that reason.
        """
        spent = Spent()
        if not self._limits():
            yield spent
            return
        self.check()
        began, left = self.clock(), self._left_s(gpus)
        least = 0.0
        try:
            with stopping.deadline(left, SPENT):
                yield spent
        except StageStopped as error:
            least = left if str(error) == SPENT else 0.0  # the two clocks may differ by a little
            raise
        finally:
            if spent.counts:
                self._add(max(self.clock() - began, least), gpus)
            if least:
                self.check()

    def close(self) -> None:
        """Reset the spent amounts: the run has finished, and the next one starts at 0.

        A run without a budget does not touch the ledger of another run of the same name.
        """
        if self._limits():
            discard(self.store, self._name)

    def _limits(self) -> list[tuple[str, float, float]]:
        """Key, spent amount and limit of each limited part of the budget."""
        hours, gpu_hours = self._ledger.seconds / HOUR, self._ledger.gpu_seconds / HOUR
        prices = self.config.prices
        found = (
            ("hours", hours, self.config.hours),
            ("gpu_hours", gpu_hours, self.config.gpu_hours),
            ("cost", hours * prices.machine + gpu_hours * prices.gpu, self.config.cost),
        )
        return [(key, spent, limit) for key, spent, limit in found if limit is not None]

    def _left_s(self, gpus: float) -> float:
        prices = self.config.prices
        rates = {"hours": 1.0, "gpu_hours": gpus, "cost": prices.machine + gpus * prices.gpu}
        left = [(limit - spent) * HOUR / rates[key] for key, spent, limit in self._limits() if rates[key]]
        return min(left, default=float("inf"))

    def _add(self, seconds: float, gpus: float) -> None:
        spent = {
            "seconds": self._ledger.seconds + seconds,
            "gpu_seconds": self._ledger.gpu_seconds + seconds * gpus,
        }
        self._ledger = self._ledger.model_copy(update=spent)
        update(self.store, self._name, lambda _: self._ledger.model_dump())

    @property
    def _name(self) -> str:
        return f"budgets/{sha256_text(self.run)}"


def gpus_of(spec: StageSpec, runtime: RuntimeConfig) -> float:
    """Number of GPUs that the engines of a stage hold."""
    pooled = sum(pool.workers * pool.gpus_per_worker for pool in runtime.pools.values() if "trainer" in spec.engines)
    train = runtime.train_workers * runtime.gpus_per_train_worker if "trainer" in spec.engines else 0.0
    sample = runtime.sampler.needs().engines * runtime.gpus_per_engine if "sampler" in spec.engines else 0.0
    if runtime.shares_gpus:  # a train worker and an engine hold the same GPU, which counts once
        workers = runtime.train_workers if "trainer" in spec.engines else 0
        needs = runtime.sampler.needs()
        engines = needs.engines * needs.tensor_parallel if "sampler" in spec.engines else 0
        return float(max(workers, engines) + pooled)
    return float(train + sample + pooled)


def cpus_of(spec: StageSpec, runtime: RuntimeConfig) -> float:
    """Number of processes of a stage that occupy one CPU each: the driver, its workers and engines."""
    workers = runtime.train_workers + sum(pool.workers for pool in runtime.pools.values())
    engines = runtime.sampler.needs().engines
    return float(1 + workers * ("trainer" in spec.engines) + engines * ("sampler" in spec.engines))


def pairs_asked(config: ProposeComparisonsConfig) -> int:
    """The largest number of pairs in a proposal, including repeats and attention checks."""
    return (
        config.budget + round(config.repeat_fraction * config.budget) + round(config.attention_fraction * config.budget)
    )


def check_comparisons(budget: BudgetConfig, planned: Sequence[StageSpec]) -> None:
    """Raise ConfigError if the pipeline may propose more pairs than its budget, including finished rounds."""
    if budget.comparisons is None:
        return
    asked = {
        spec.label: pairs_asked(spec.config) for spec in planned if isinstance(spec.config, ProposeComparisonsConfig)
    }
    total = sum(asked.values())
    if total > budget.comparisons:
        rule = f"{' + '.join(f'{label} {pairs}' for label, pairs in asked.items())} may propose {total} pairs"
        remedy = "lower the budget of the proposals or the number of rounds, or raise this one"
        raise ConfigError("budget.comparisons", budget.comparisons, rule, remedy)
