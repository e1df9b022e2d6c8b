"""The gate, the card and the registry."""

import json
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from pydantic import ValidationError

from rlhf_core.errors import ConfigError
from rlhf_core.interfaces import RegistryState
from rlhf_core.stage.run import execute
from rlhf_core.store import roots
from rlhf_core.training.exports import export_folder
from rlhf_core.types import PolicyRef, ReportRef
from stages.publish import PublishConfig, Threshold
from stages.publish.run import copy_for_hub
from tests.support.toy_stage import NoEngines, toy_spec
from tests.support.workshop import Workshop, quiet, workshop


def interval(mean: float, **more: Any) -> dict[str, Any]:
    return {"mean": mean, "low": mean - 0.1, "high": mean + 0.1, **more}


@pytest.fixture
def shop(tmp_path) -> Workshop:
    return workshop(tmp_path)


@pytest.fixture
def inputs(shop: Workshop, tmp_path) -> dict[str, Any]:
    """A policy whose report says: gold 2.0 (sft 1.0), win rate 0.7, KL 9, length 30 (sft 20)."""
    for name in ("policy", "report"):
        (tmp_path / name).mkdir()
    (tmp_path / "policy" / "config.json").write_text("{}")
    policy = shop.store.external(PolicyRef, tmp_path / "policy")
    report = {
        "key": "k",
        "reference": "sft",
        "compared_by": "gold",
        "order": ["sft", "ppo"],
        "policies": {
            "sft": {"digest": "d1", "prompts": 64, "samples": 64, "gold": interval(1.0), "tokens": interval(20)},
            "ppo": {
                "digest": policy.digest, "prompts": 64, "samples": 64, "gold": interval(2.0), "tokens": interval(30),
                "kl": interval(9.0, kind="estimate"), "win_rate": interval(0.7, against="sft", prompts=64), "entropy": 0.5,
                "sources": {"a/b.c": {"prompts": 12, "gold": {"mean": 3.0}, "kl": interval(2.0, prompts=12)}},
            },
        },
        "lineage": [
            {"label": "sft", "digest": "d1", "parents": ["prepare_data"], "config": {"max_length": 256}, "stage": "sft", "key": "k1"},
            {"label": "ppo", "digest": policy.digest, "parents": ["sft"], "config": {"kl_coef": 0.05}, "stage": "ppo", "key": "k2"},
        ],
        "settings": {"level": 0.95},
    }  # fmt: skip
    (tmp_path / "report" / "report.json").write_text(json.dumps(report))
    return {"policy": policy, "report": shop.store.external(ReportRef, tmp_path / "report")}


GOOD = (
    Threshold(metric="gold/mean", op=">", than="sft"),
    Threshold(metric="kl.mean", op="<=", value=10),
    Threshold(metric="tokens/mean", op="<=", than="sft", factor=1.5),
)


def publish(shop: Workshop, inputs: dict[str, Any], **config: Any) -> tuple[dict[str, Any], str, Any]:
    ref, decision = shop.run("publish", PublishConfig(**config), inputs)
    folder = shop.store.path(ref)
    return json.loads((folder / "gate.json").read_text()), (folder / "README.md").read_text(), decision


def test_a_passed_gate_makes_the_policy_champion(shop, inputs):
    gate, card, decision = publish(shop, inputs, gate=GOOD)
    assert gate["passed"] is True
    assert [(check["value"], check["threshold"], check["pass"]) for check in gate["checks"]] == [
        (2.0, 1.0, True),
        (9.0, 10.0, True),
        (30.0, 30.0, True),  # 1.5 times 20
    ]
    ((name, digest, aliases, tags),) = shop.tracker.registered
    assert (name, digest, aliases) == ("rlhf-policy", inputs["policy"].digest, ("candidate", "champion"))
    assert tags["gate"] == "passed"
    assert tags["eval.gold"] == "2"
    assert gate["registry"] == {"name": "rlhf-policy", "version": "1", "aliases": ["candidate", "champion"]}
    assert shop.metrics(decision) == {"gate/passed": 1.0, "gate/checks": 3.0}
    assert "Gate: **passed**" in card


@pytest.mark.parametrize(("license", "header"), [("Apache-2.0", "apache-2.0"), ("Ask us first.", "other")])
def test_by_option_there_is_a_folder_for_the_hub_with_weights_and_card(shop, inputs, tmp_path, license, header):
    (tmp_path / "policy" / "model-00001-of-00002.safetensors").write_bytes(b"weights")
    policy = shop.store.external(PolicyRef, tmp_path / "policy")
    report = json.loads(
        (tmp_path / "report" / "report.json").read_text().replace(inputs["policy"].digest, policy.digest)
    )
    (tmp_path / "report" / "report.json").write_text(json.dumps(report))
    inputs = {"policy": policy, "report": shop.store.external(ReportRef, tmp_path / "report")}
    ref, _ = shop.run("publish", PublishConfig(name="support", gate=GOOD, hub=True, license=license), inputs)
    folder = shop.store.path(ref) / "hub"
    assert (folder / "model-00001-of-00002.safetensors").read_bytes() == b"weights"
    assert (folder / "config.json").is_file()
    card = ModelCard.load(folder / "README.md")  # as the Hub reads it
    assert (card.data.license, card.data.library_name, card.data.tags) == (header, "transformers", ["rlhf"])
    assert card.text.strip().startswith("# support")
    ref, _ = shop.run("publish", PublishConfig(gate=GOOD), inputs)
    assert not (shop.store.path(ref) / "hub").exists()


@pytest.mark.parametrize(
    ("path", "least", "found"),
    [
        ("sources/a/b.c/kl/high", 6, [(2.1, True)]),
        ("sources.a/b.c.kl.high", 13, [(2.1, True), (12.0, False)]),  # of the source, of all there are 64
        ("sources/a/b.c/gold/high", 6, [(None, False)]),
    ],
)
def test_a_condition_may_be_on_the_prompts_of_a_source(shop, inputs, path, least, found):
    gate, *_ = publish(shop, inputs, gate=[{"metric": path, "op": "<", "value": 5}], least_prompts=least)
    assert [(check["value"], check["pass"]) for check in gate["checks"]] == found


def with_champion(
    shop: Workshop, inputs: dict[str, Any], tmp_path: Path, low: float, change: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Add a champion that the policy's gold reward exceeds by an interval that begins at `low`."""
    (tmp_path / "champion").mkdir()
    (tmp_path / "champion" / "config.json").write_text('{"old": true}')
    champion = shop.store.external(PolicyRef, tmp_path / "champion")
    file = shop.store.path(inputs["report"]) / "report.json"
    report = json.loads(file.read_text())
    report["policies"]["champion"] = {"digest": champion.digest, "prompts": 64, "samples": 64, "gold": interval(1.5)}
    found = {"mean": low + 0.1, "low": low, "high": low + 0.2} if change is None else change
    report["policies"]["ppo"]["gold_over_champion"] = found
    (tmp_path / "compared").mkdir()
    (tmp_path / "compared" / "report.json").write_text(json.dumps(report))
    shop.tracker.known_champions = RegistryState(champion.digest)
    return inputs | {"report": shop.store.external(ReportRef, tmp_path / "compared"), "champion": champion}


@pytest.mark.parametrize("least", [6, 1])
@pytest.mark.parametrize(
    ("prompts", "change"),
    [
        (1, {"low": 0.5, "mean": 0.6, "high": 0.7, "prompts": 1}),
        (5, {"low": 0.5, "mean": 0.6, "high": 0.7, "prompts": 5}),
        (1, {"mean": 0.6, "prompts": 1}),
        (6, {"low": 0.5, "mean": 0.6, "high": 0.7, "prompts": 6}),
    ],
)
def test_a_challenger_does_not_win_on_few_prompts(shop, inputs, tmp_path, prompts, change, least):
    compared = with_champion(shop, inputs, tmp_path, 0.5, change)
    gate, card, _ = publish(shop, compared, least_prompts=least, challenge={"metric": "gold"})
    assert gate["passed"] is ("low" in change and prompts >= least)
    assert ({"prompts"} <= {check["metric"] for check in gate["checks"]}) is (prompts < least)
    json.dumps(gate, allow_nan=False)
    assert ("| prompts | >= 6 |" in card) is (prompts < least)


def test_each_number_of_a_gate_is_of_enough_prompts(shop, inputs):
    file = shop.store.path(inputs["report"]) / "report.json"
    report = json.loads(file.read_text())
    report["policies"]["sft"]["prompts"] = 3  # whom the policy is compared with
    file.write_text(json.dumps(report))
    few = inputs | {"report": shop.store.external(ReportRef, file.parent)}
    for gate, passes in ((GOOD[0], False), (GOOD[1], True)):
        assert publish(shop, few, gate=(gate,))[0]["passed"] is passes


@pytest.mark.parametrize(("low", "margin", "wins"), [(0.05, 0.0, True), (0.0, 0.0, False), (0.05, 0.1, False)])
def test_the_alias_moves_only_if_the_champion_is_beaten_by_the_margin(shop, inputs, tmp_path, low, margin, wins):
    compared = with_champion(shop, inputs, tmp_path, low)
    gate, card, _ = publish(shop, compared, gate=GOOD, challenge={"metric": "gold", "margin": margin})
    assert gate["passed"] is wins and gate["checks"][-1]["metric"] == "gold_over_champion/low"
    ((_, _, aliases, tags),) = shop.tracker.registered
    assert aliases == (("candidate", "champion") if wins else ("candidate",))
    moves = [json.loads(value) for key, value in tags.items() if key.startswith("champion.")]
    assert len(moves) == wins
    if wins:
        assert moves[0]["how"] == "publish" and moves[0]["by"] and "gold_over_champion/low 0.05 > 0" in moves[0]["why"]
    assert f"| gold_over_champion/low | > {margin:.4g} | {low:.4g} |" in card


@pytest.mark.parametrize("now", [RegistryState("ab" * 32), RegistryState(), None])
def test_the_alias_does_not_move_if_the_champion_is_another_than_the_one_compared_with(shop, inputs, tmp_path, now):
    compared = with_champion(shop, inputs, tmp_path, 0.1)
    shop.tracker.known_champions = now
    said = "the registry does not answer," if now is None else f"the champion is {now.champion[:12] or 'none'} now, and"
    with pytest.raises(ConfigError, match=rf"publish.challenge = 'rlhf-policy': {said} .*; run again"):
        publish(shop, compared, challenge={})
    assert shop.tracker.registered == []
    shop.tracker.known_champions = RegistryState(inputs["policy"].digest)  # made again, of the champion
    assert publish(shop, compared, challenge={})[0]["passed"] is True


@pytest.mark.parametrize("challenge", [None, {}])
def test_a_policy_that_was_rolled_back_stays_a_candidate(shop, inputs, tmp_path, challenge):
    compared = with_champion(shop, inputs, tmp_path, 0.1)
    shop.tracker.known_champions = RegistryState(compared["champion"].digest, frozenset({inputs["policy"].digest}))
    gate, card, _ = publish(shop, compared, challenge=challenge)
    assert gate["passed"] is False and gate["registry"]["aliases"] == ["candidate"]
    assert "| was rolled back | <= 0 | 1 | **fails** |" in card
    assert not any(key.startswith("champion.") for key in shop.tracker.registered[0][3])


def test_a_first_policy_and_the_champion_itself_have_no_opponent(shop, inputs):
    for given in (inputs, inputs | {"champion": inputs["policy"]}):
        shop.tracker.known_champions = RegistryState(given["champion"].digest if "champion" in given else "")
        gate, _, _ = publish(shop, given, gate=GOOD, challenge={})
        assert gate["passed"] is True and len(gate["checks"]) == len(GOOD)


def test_a_report_without_that_champion_or_metric_is_refused(shop, inputs, tmp_path):
    compared = with_champion(shop, inputs, tmp_path, 0.1)
    with pytest.raises(
        ConfigError, match=r"publish.challenge.metric = 'gold': the report does not evaluate the champion"
    ):
        publish(shop, compared | {"report": inputs["report"]}, challenge={})
    with pytest.raises(
        ConfigError, match=r"'reward_model': the report does not compare with the champion by it; train"
    ):
        publish(shop, compared, challenge={"metric": "reward_model"})
    assert shop.tracker.registered == []


def test_the_card_says_who_decided_what_at_gates(shop, inputs):
    note = {
        "name": "quality",
        "found": "accuracy_low 0.61 < 0.65",
        "outcome": "approved",
        "answer": "approved by ada: a|b\n\nc",
    }
    _, card, _ = publish(shop, inputs, decisions=[note])
    assert "| quality | accuracy_low 0.61 < 0.65 | approved | approved by ada: a\\|b c |" in card
    _, card, _ = publish(shop, inputs)
    assert "The run had no gates." in card


def test_what_is_registered_stays_in_the_store(shop, inputs):
    made, _ = execute(shop.store, toy_spec(), runtime=NoEngines(), tracker=shop.tracker, progress=quiet)
    report = shop.store.path(inputs["report"]) / "report.json"
    report.write_text(report.read_text().replace(inputs["policy"].digest, made.digest))
    publish(shop, {"policy": made, "report": shop.store.external(ReportRef, report.parent)}, gate=GOOD)
    assert roots.pins(shop.store.shared) == {made.digest: "rlhf-policy champion"}


def test_the_folder_for_the_hub_can_be_written_to_and_has_nothing_of_the_store(shop, tmp_path):
    made, _ = execute(shop.store, toy_spec(), runtime=NoEngines(), tracker=shop.tracker, progress=quiet)
    source, folder = shop.store.path(made), tmp_path / "hub"
    assert not source.stat().st_mode & stat.S_IWUSR and (source / "manifest.json").exists()
    copy_for_hub(source, folder)
    assert {path.name for path in folder.iterdir()} == {"total.txt", "padding.bin"}
    assert all(path.stat().st_mode & stat.S_IWUSR for path in (folder, *folder.iterdir()))
    export_folder(tmp_path / "policy", 2).mkdir(parents=True)
    (tmp_path / "policy" / "config.json").write_text("{}")
    copy_for_hub(tmp_path / "policy", tmp_path / "last")
    assert [path.name for path in (tmp_path / "last").iterdir()] == ["config.json"], (
        "policies on the way are other models"
    )


def test_nothing_is_registered_if_the_folder_for_the_hub_fails(shop, inputs, monkeypatch):
    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(shutil, "copytree", lambda *_, **__: full())
    with pytest.raises(OSError, match="no space left"):
        publish(shop, inputs, gate=GOOD, hub=True)
    assert shop.tracker.registered == [] and roots.pins(shop.store.shared) == {}


def test_a_failed_gate_is_written_down_and_leaves_the_champion_alone(shop, inputs, caplog):
    gate, card, decision = publish(shop, inputs, gate=(*GOOD, Threshold(metric="win_rate/low", op=">=", value=0.65)))
    assert gate["passed"] is False
    assert [check["pass"] for check in gate["checks"]] == [True, True, True, False]
    assert shop.tracker.registered[0][2] == ("candidate",)
    assert shop.tracker.registered[0][3]["gate"] == "failed"
    assert shop.metrics(decision)["gate/passed"] == 0.0
    assert "Gate: **not passed**" in card
    assert "| win_rate/low | >= 0.65 | 0.6 | **fails** |" in card
    assert caplog.messages[-1].endswith("is a candidate only, not met: win_rate/low 0.6 >= 0.65")


def test_the_card_says_what_the_policy_was_made_from_and_how_good_it_is(shop, inputs):
    _, card, _ = publish(shop, inputs, intended_use="Replies of a support desk.", license="Apache-2.0")
    for line in (
        "- **sft** `d1`, from prepare_data",
        f"- **ppo** `{inputs['policy'].digest}`, from sft",
        '"kl_coef": 0.05',
        "| gold | 2 | 1.9 to 2.1 |",
        "| win_rate against sft | 0.7 | 0.6 to 0.8 |",
        "| entropy | 0.5 | |",
        "| gold of a/b.c | 3 | not known |",
        "## Intended use\n\nReplies of a support desk.",
        "## License\n\nApache-2.0",
    ):
        assert line in card


def test_gate_and_card_reach_the_tracker(shop, inputs):
    publish(shop, inputs, gate=GOOD[:1])
    assert shop.tracker.tables["gate"][1] == [("gold/mean", ">", 1.0, 2.0, True)]
    assert shop.tracker.files == [("", "gate.json"), ("", "README.md")]
    assert shop.tracker.input_models == [inputs["policy"].digest]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"gate": [{"metric": "gold/median", "op": ">", "value": 1}]},
            r"publish.gate\[0\].metric = 'gold/median'.*mean, low, high",
        ),
        ({"gate": [{"metric": "gold", "op": ">", "value": 1}]}, "is not a number; add one of mean, low, high"),
        ({"gate": [{"metric": "gold/mean", "op": ">", "than": "dpo"}]}, r"no policy 'dpo' \(sft, ppo\)"),
        (
            {"gate": [{"metric": "sources/a/b/kl/mean", "op": ">", "value": 1}]},
            r"ppo has no 'a/b/kl/mean' there \(a/b.c\)",
        ),
        ({"policy": "dpo"}, r"publish.policy = 'dpo': is not in the report \(sft, ppo\)"),
        ({"policy": "sft"}, "the report evaluates other weights under this name"),
    ],
)
def test_a_gate_that_cannot_be_judged_is_an_error_and_not_a_failure(shop, inputs, config, message):
    with pytest.raises(ConfigError, match=message):
        shop.run("publish", PublishConfig(**config), inputs)
    assert shop.tracker.registered == []


def test_a_policy_that_was_not_judged_is_not_published(shop, inputs, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"other": 1}')
    inputs["policy"] = shop.store.external(PolicyRef, tmp_path / "other")
    with pytest.raises(ConfigError, match="was not evaluated in this report"):
        shop.run("publish", PublishConfig(), inputs)


def test_a_threshold_is_a_number():
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValidationError, match="finite"):
            Threshold(metric="gold/mean", op=">=", value=value)


@pytest.mark.parametrize("bound", [{}, {"value": 1.0, "than": "sft"}])
def test_a_threshold_has_exactly_one_bound(bound):
    with pytest.raises(ValidationError, match="either value or than"):
        Threshold.model_validate({"metric": "gold/mean", "op": ">=", **bound})
