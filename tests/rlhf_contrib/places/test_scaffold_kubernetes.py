"""What `rlhf scaffold kubernetes` writes, checked by the schemas of those who read it, with unknown keys refused."""

import asyncio
import copy
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import jsonschema
import pytest
import yaml

from pipelines.cli.main import main
from rlhf_contrib.places.verb import TEMPLATES

pytestmark = pytest.mark.services
FILES = TEMPLATES / "kubernetes"
KUBERAY = "KUBERAY_CRDS"
"""Variable with the folder of KubeRay's own definitions, `ray-operator/config/crd/bases` of release 1.5 or later."""
Check = Callable[[dict[str, Any]], list[str]]


@pytest.fixture(scope="module")
def kuberay() -> Check:
    """Return what KubeRay's own definitions of its resources find wrong in one."""
    if KUBERAY not in os.environ:
        pytest.skip(f"{KUBERAY} names no folder with KubeRay's definitions, which no package has")
    definitions = Path(os.environ[KUBERAY])
    found = [yaml.safe_load((definitions / f"ray.io_{kind}.yaml").read_text()) for kind in ("rayclusters", "rayjobs")]
    schemas = {one["spec"]["names"]["kind"]: schema_of(one) for one in found}
    return lambda document: [
        f"{one.json_path}: {one.message}"
        for one in jsonschema.Draft7Validator(schemas[document["kind"]]).iter_errors(document)
    ]


def schema_of(definition: dict[str, Any]) -> dict[str, Any]:
    [version] = [one for one in definition["spec"]["versions"] if one["name"] == "v1"]
    schema = version["schema"]["openAPIV3Schema"]
    schema["properties"]["metadata"] = {"type": "object"}  # the API server's own, and empty here
    refuse_unknown_keys(schema)
    return schema


def refuse_unknown_keys(schema: Any) -> None:
    if isinstance(schema, dict):
        if "properties" in schema and "x-kubernetes-preserve-unknown-fields" not in schema:
            schema.setdefault("additionalProperties", False)
        if schema.get("x-kubernetes-int-or-string"):
            schema.pop("type", None)
    for one in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        refuse_unknown_keys(one)


def manifest(name: str) -> dict[str, Any]:
    return yaml.safe_load((FILES / name).read_text())


@pytest.mark.parametrize(
    ("file", "path"), [("raycluster.yaml", ("spec",)), ("rayjob.yaml", ("spec", "rayClusterSpec"))]
)
def test_kuberay_accepts_cluster_and_job_and_refuses_a_misspelt_key(file, path, kuberay):
    assert kuberay(manifest(file)) == []
    for inside in ((), ("headGroupSpec", "template", "spec", "containers", 0)):
        wrong = manifest(file)
        place: Any = wrong
        for name in (*path, *inside):
            place = place[name]
        place["rayVersoin"] = "2.60.0"
        [error] = kuberay(wrong)
        assert "rayVersoin" in error


def test_rays_autoscaler_reads_the_cluster_and_its_pods_are_those_of_kubernetes():
    kubernetes = pytest.importorskip("kubernetes_validate", reason="of requirements/services.txt")
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    cluster = manifest("raycluster.yaml")
    config = _derive_autoscaling_config_from_ray_cr(cluster | {"metadata": {"name": "rlhf", "namespace": "default"}})
    head, gpu = (config["available_node_types"][name] for name in ("headgroup", "gpu"))
    assert head["resources"]["GPU"] == 0 and head["resources"]["CPU"] == 4
    assert (gpu["resources"]["GPU"], gpu["min_workers"], gpu["max_workers"]) == (8, 0, 4)
    for group in (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": group["template"]["spec"]}
        kubernetes.validate(pod, kubernetes.latest_version(), strict=True)
        pod["spec"]["containers"][0]["volumeMount"] = []
        with pytest.raises(kubernetes.ValidationError, match="volumeMount"):
            kubernetes.validate(pod, kubernetes.latest_version(), strict=True)


def test_the_ray_of_the_pods_is_the_one_of_the_pins_and_job_and_cluster_have_the_same_pods():
    cluster, job = manifest("raycluster.yaml")["spec"], manifest("rayjob.yaml")["spec"]["rayClusterSpec"]
    [pinned] = [
        line
        for line in (Path(__file__).parents[3] / "requirements/gpu.txt").read_text().splitlines()
        if line.startswith("ray==")
    ]
    assert pinned == f"ray=={cluster['rayVersion']}"
    once = copy.deepcopy(cluster) | {
        "workerGroupSpecs": [cluster["workerGroupSpecs"][0] | {"replicas": 1, "minReplicas": 1}]
    }
    del once["enableInTreeAutoscaling"]
    assert job == once


def test_a_pod_has_the_memory_that_the_planner_says_for_its_profile(tmp_path, capsys):
    """Its node's host memory, /dev/shm, which counts as the container's, and 8 GiB for what each of 8 workers loads."""
    entrypoint = manifest("rayjob.yaml")["spec"]["entrypoint"].split()
    words = ["plan", entrypoint[2], "--estimate", "--json", "--set", f"store={tmp_path}"]
    assert main(words) == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    node = max(one["bytes"] for stage in stages for one in stage["memory"] if one["where"] == "node") / 2**30
    pod = manifest("raycluster.yaml")["spec"]["workerGroupSpecs"][0]["template"]["spec"]
    [shared] = [one["emptyDir"]["sizeLimit"] for one in pod["volumes"] if one["name"] == "shm"]
    resources = pod["containers"][0]["resources"]
    needed = node + gib(shared) + 8 * int(resources["limits"]["nvidia.com/gpu"])
    assert needed <= gib(resources["requests"]["memory"]) < needed + 16
    assert resources["limits"]["memory"] == resources["requests"]["memory"]
    template = json.loads((FILES / "prefect-job-template.json").read_text())["variables"]["properties"]
    assert template["memory"]["default"] == resources["limits"]["memory"]


@pytest.mark.parametrize(
    ("file", "patch", "path"),
    [
        ("raycluster.yaml", "rdma-raycluster.yaml", ("spec",)),
        ("rayjob.yaml", "rdma-rayjob.yaml", ("spec", "rayClusterSpec")),
    ],
)
def test_the_patch_for_rdma_gives_workers_a_device_and_the_right_to_lock_memory(file, patch, path):
    patched = manifest(file)
    for one in manifest(patch):
        *parents, last = [part.replace("~1", "/") for part in one["path"].split("/")[1:]]
        place: Any = patched
        for part in parents:
            place = place[int(part) if part.isdigit() else part]
        assert one["op"] == "add" and last not in place  # JSON patches need the parents, and nothing is replaced
        place[last] = one["value"]
    cluster = patched
    for part in path:
        cluster = cluster[part]
    container = cluster["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
    assert container["securityContext"] == {"runAsUser": 0, "capabilities": {"add": ["IPC_LOCK"]}}
    for kind in ("requests", "limits"):
        assert container["resources"][kind]["rdma/hca_shared_devices_a"] == "1"
        assert container["resources"][kind]["nvidia.com/gpu"] == "8"
    assert patch in (FILES / "kustomization.yaml").read_text()


def gib(size: str) -> float:
    return float(size.removesuffix("Gi"))


def test_prefect_makes_a_job_of_the_template_that_kubernetes_accepts():
    worker = pytest.importorskip("prefect_kubernetes.worker", reason="prefect-kubernetes, of requirements/services.txt")
    kubernetes = pytest.importorskip("kubernetes_validate", reason="of requirements/services.txt")
    from prefect.client.schemas.objects import FlowRun
    from prefect.settings import PREFECT_API_URL, temporary_settings

    template = json.loads((FILES / "prefect-job-template.json").read_text())

    def job(template: dict[str, Any]) -> dict[str, Any]:
        values = {"env": {"RLHF_USER": "ada"}, "gpus": "4"}
        with temporary_settings(
            {PREFECT_API_URL: "http://127.0.0.1:9/api"}
        ):  # nothing is asked there, and no server started
            made = asyncio.run(worker.KubernetesWorkerJobConfiguration.from_template_and_values(template, values))
            made.prepare_for_flow_run(FlowRun(id=uuid4(), flow_id=uuid4(), name="mini"))
        kubernetes.validate(made.job_manifest, kubernetes.latest_version(), strict=True)
        return made.job_manifest["spec"]["template"]["spec"]["containers"][0]

    pod = job(template)
    # The image's entry point is `rlhf`, which has no such command.
    assert pod["command"] == ["env"] and pod["args"][0] == "prefect"
    variables = {one["name"]: one["value"] for one in pod["env"]}
    assert (variables["RLHF_USER"], variables["RLHF_CACHE"]) == ("ada", "/var/cache/rlhf")
    assert pod["resources"]["limits"]["nvidia.com/gpu"] == "4"
    spec = template["job_configuration"]["job_manifest"]["spec"]
    spec["backofLimit"] = spec.pop("backoffLimit")
    with pytest.raises(kubernetes.ValidationError, match="backofLimit"):
        job(template)


def test_kustomize_fills_in_image_and_secret():
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    text = subprocess.run([kubectl, "kustomize", str(FILES)], capture_output=True, text=True, check=True).stdout
    made = {one["kind"]: one for one in yaml.safe_load_all(text)}
    pods = [made["RayCluster"]["spec"]["headGroupSpec"], *made["RayCluster"]["spec"]["workerGroupSpecs"]]
    for container in (one["template"]["spec"]["containers"][0] for one in pods):
        assert container["image"] == "registry.example/rlhf:0.3.0"
        assert container["envFrom"] == [{"secretRef": {"name": made["Secret"]["metadata"]["name"]}}]
