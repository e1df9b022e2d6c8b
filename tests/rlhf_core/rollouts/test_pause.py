"""A monitor pauses a run: a person decides, at whatever time, and the result is that of the decision."""

from typing import Any

import pytest

from rlhf_core.stage.gate_decisions import Answer, GateDecisions, Question
from rlhf_core.stage.stopping import StageWaiting
from rlhf_core.types import ArtifactRef
from stages.ppo import PPOConfig
from tests.rlhf_core.rollouts.test_guard import EVALUATE, ROLLBACK, report, watched
from tests.support.training import series, shop_and_inputs, untimed
from tests.support.workshop import Workshop

PAUSE = ROLLBACK | {"action": "pause", "for_steps": 2}
"""At step 2, since no answer is short enough."""


def pausing(**changes: Any) -> PPOConfig:
    return watched(**({"evaluate": EVALUATE, "monitors": [PAUSE], "steps": 5, "checkpoint_every": 100} | changes))


def decide(shop: Workshop, question: Question, answer: Answer, *, by: str) -> None:
    decisions = GateDecisions(shop.store.shared)
    decisions.decide(decisions.ask(question, run="night", links={}), answer, reason="looked at it", by=by)


def paused(shop: Workshop, settings: PPOConfig, inputs: dict[str, Any]) -> Question:
    """Run until the stage waits, and return what it asks."""
    with pytest.raises(
        StageWaiting, match=r"^ppo is waiting: monitor short_enough: rollout/length .* at step 2: paused"
    ) as waits:
        shop.run("ppo", settings, inputs)
    return Question.model_validate(waits.value.condition["question"])


@pytest.mark.parametrize("answer", ["approve", "reject"])
def test_the_result_is_that_of_the_decision_whenever_it_came(tmp_path, policy, answer):
    late, inputs = shop_and_inputs(tmp_path / "late", policy)
    question = paused(late, pausing(), inputs)
    leased = late.runtime.engines()
    with pytest.raises(StageWaiting):  # nobody has decided yet
        late.run("ppo", pausing(), inputs)
    assert late.runtime.engines() == leased
    decide(late, question, answer, by="ada")
    ref, decision = late.run("ppo", pausing(), inputs)
    assert (decision.action, decision.step) == ("RESUME", 2)

    early, inputs = shop_and_inputs(tmp_path / "early", policy)
    decide(early, question, answer, by="bob")  # before the run has come to it
    again, decision = early.run("ppo", pausing(), inputs)
    assert decision.action == "RUN" and again.digest == ref.digest
    assert untimed(early.tracker.points) == untimed(late.tracker.points)
    assert early.tracker.tags != late.tracker.tags  # who has decided, and when
    assert "d by ada at 20" in late.tracker.tags["monitor.short_enough"]

    steps = {"approve": 5.0, "reject": 2.0}[answer]
    assert late.metrics(decision)["steps"] == steps == len(series(late, "rollout/length"))
    (event,) = report(late, ref)["events"]
    said = {"approve": "paused, approved: goes on", "reject": "paused, rejected: stopped, step 0 is the result"}[answer]
    assert event["message"].endswith(f"> 0.5 for 2 steps at step 2: {said}")


def test_an_approved_run_is_the_one_that_was_only_warned_of(tmp_path, policy):
    def exported(name: str, settings: PPOConfig) -> tuple[bytes, float]:
        shop, inputs = shop_and_inputs(tmp_path / name, policy)
        if settings.monitors[0].action == "pause":
            decide(shop, paused(shop, settings, inputs), "approve", by="ada")
        ref, decision = shop.run("ppo", settings, inputs)
        return weights(shop, ref), shop.metrics(decision)["exported_step"]

    # Evaluations after the approval count for the best one, although the complaint lasts.
    every = EVALUATE.model_copy(update={"every": 1, "independent": None})
    warned = pausing(evaluate=every, monitors=[PAUSE | {"action": "warn"}])
    expected, step = exported("warned", warned)
    assert step > 2
    assert exported("paused", pausing(evaluate=every)) == (expected, step)


def test_a_pause_at_the_last_step_decides_about_the_result(tmp_path, policy):
    last = EVALUATE.model_copy(update={"export": "last"})
    results = {}
    for answer in ("approve", "reject"):
        shop, inputs = shop_and_inputs(tmp_path / answer, policy)
        settings = pausing(evaluate=last, steps=2)
        decide(shop, paused(shop, settings, inputs), answer, by="ada")
        _, decision = shop.run("ppo", settings, inputs)
        results[answer] = shop.metrics(decision)["exported_step"]
    assert results == {"approve": 2.0, "reject": 0.0}


def weights(shop: Workshop, ref: ArtifactRef) -> bytes:
    return (shop.store.path(ref) / "model.safetensors").read_bytes()
