"""Refer to a policy in the store from MLflow, so that its registered model can be loaded without a copy of the weights."""

import json
import tempfile
from pathlib import Path
from typing import Any

from rlhf_core.store.layout import StoreLayout

REFERENCE = "policy.json"
LOADER = "rlhf_core.tracking.policy_model"
_STORE, _FILE = "store://", "file://"


def folder_of(uri: str, store: Path | None) -> Path | None:
    """Find the folder of a policy from its uri; None without a store, or if it is no causal language model."""
    if uri.startswith(_FILE):
        folder = Path(uri.removeprefix(_FILE))
    elif uri.startswith(_STORE) and store is not None:
        digest, _, inside = uri.removeprefix(_STORE).partition("/")
        folder = StoreLayout(store).object(digest) / inside
    else:
        return None
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return folder if any(name.endswith("ForCausalLM") for name in config.get("architectures") or ()) else None


def save_model_file(mlflow: Any, client: Any, model: Any, policy: Path | None) -> None:
    """Write the MLmodel file of a logged model, which the registry requires; with a policy, the file loads it."""
    with tempfile.TemporaryDirectory() as folder:
        spec = mlflow.models.utils.get_external_mlflow_model_spec(model)
        if policy is None:
            spec.save(str(Path(folder) / "MLmodel"))
        else:
            save_reference(mlflow, spec, policy, Path(folder))
        client.log_model_artifacts(model.model_id, folder)


def save_reference(mlflow: Any, spec: Any, policy: Path, folder: Path) -> None:
    """Write an MLmodel file with a flavor that loads the policy in `policy`, and the file with its location."""
    (folder / REFERENCE).write_text(json.dumps({"folder": str(policy)}), encoding="utf-8")
    spec.metadata = None  # its text is that MLflow cannot load the model
    # The one it has is a placeholder, against which MLflow would check every input.
    types = mlflow.types
    spec.signature = mlflow.models.ModelSignature(
        params=types.ParamSchema(
            [
                types.ParamSpec("max_new_tokens", types.DataType.long, 256),
                types.ParamSpec("do_sample", types.DataType.boolean, False),
                types.ParamSpec("temperature", types.DataType.double, 1.0),
            ]
        )
    )
    mlflow.pyfunc.add_to_model(spec, loader_module=LOADER, data=REFERENCE)
    spec.save(str(folder / "MLmodel"))
