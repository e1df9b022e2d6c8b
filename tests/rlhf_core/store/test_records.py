import json
import math

import pytest

from rlhf_core.errors import ArtifactError
from rlhf_core.store.records import KeyRecord, Provenance, restore_handle, stored_handle
from rlhf_core.types import DemonstrationsRef, PolicyRef, PreparedDataRef, RewardModelRef

PROVENANCE = Provenance(
    label="ppo",
    stage="ppo",
    payload={"config": {"kl_coef": 0.05}},
    inputs=("store://aa",),
    code={"stages.ppo.run": "1"},
    metrics={"reward": 1.5, "bad": math.nan},
    engines={"torch": "2"},
    environment={"python": "3.11"},
    started="2030-01-01T00:00:00.000+00:00",
    seconds=2.5,
    tracking={"mlflow_run": "x"},
    attempts=2,
    resumed_from=10,
)
PREPARED = PreparedDataRef(
    uri="store://aa",
    digest="aa",
    parents=("cc",),
    demonstrations=DemonstrationsRef(uri="store://aa/demonstrations", digest="bb"),
    base=PolicyRef(uri="store://aa/base", digest="dd"),
)


@pytest.mark.parametrize("handle", [PREPARED, RewardModelRef(uri="store://ee", digest="ee", parents=("a", "b"))])
def test_a_handle_comes_back_from_json_with_its_type_and_its_children(handle):
    restored = restore_handle(json.loads(json.dumps(stored_handle(handle))))
    assert restored == handle
    assert type(restored) is type(handle)


def test_a_record_comes_back_from_json_unchanged():
    record = KeyRecord(key="k", handle=PREPARED, **dict(PROVENANCE))
    restored = KeyRecord.model_validate(json.loads(json.dumps(record.to_json())))
    assert restored.handle == PREPARED and type(restored.handle) is PreparedDataRef
    assert restored.metrics["reward"] == 1.5 and math.isnan(restored.metrics["bad"])
    same: dict[str, dict[str, float]] = {"metrics": {}}
    assert restored.model_copy(update=same) == record.model_copy(update=same)


def test_a_record_of_a_later_version_with_more_fields_is_still_read():
    stored = KeyRecord(key="k", handle=PREPARED, **dict(PROVENANCE)).to_json() | {"gpu_hours": 1.0}
    assert KeyRecord.model_validate(stored).attempts == 2


@pytest.mark.parametrize("name", ["Message", "BaseModel", "Nowhere", "__doc__"])
def test_only_handles_can_be_restored(name):
    with pytest.raises(ArtifactError, match=r"handle\.type = "):
        restore_handle({"type": name, "fields": {}})
