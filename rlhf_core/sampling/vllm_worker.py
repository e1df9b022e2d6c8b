"""Extend vLLM's worker: finish a reload, record experts on CPU, and compare its weights with the trainer's."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from rlhf_core.models.lora import weights_digest

PROBE_ROWS = 64  # of each weight, evenly spread: whole weights would take as long as the transfer

Probes = dict[str, tuple[tuple[int, ...], Tensor]]
"""Name -> (shape of the whole tensor, some of its rows in float32 on the CPU)."""


class WeightReload:
    """Mixin for vLLM's worker, added by `worker_extension_cls`, so that `collective_rpc("repack_heads")` finds it."""

    model_runner: Any
    vllm_config: Any
    _experts: Mapping[str, list[tuple[int, NDArray[Any]]]] = {}

    def settings(self) -> dict[str, str | int]:
        """The settings that determine the log-probabilities of this engine."""
        model = self.vllm_config.model_config
        return {
            "dtype": str(model.dtype).removeprefix("torch."),
            "head_dtype": str(model.head_dtype).removeprefix("torch."),
            "max_model_len": model.max_model_len,
            "logprobs_mode": str(model.logprobs_mode),
        }

    def load_folder(self, folder: str, digest: str) -> list[str]:
        """Load the safetensors of `folder` if they have `digest`; return a list of problems, empty on success."""
        tensors = read_tensors(Path(folder))
        received = weights_digest(tensors)
        if received != digest:
            return [f"the files in {folder} have the digest {received[:12]}, not {digest[:12]}"]
        worker: Any = self
        worker.reload_weights(weights_path=folder)
        self.repack_heads()
        return [f"{name} has other values than those sent" for name in self.mismatched_weights(probe_weights(tensors))]

    def repack_heads(self) -> None:
        """Repack the LM head, and experts, from their weights; to be called once after each reload.

        On CPU a head computes with a packed copy, which vLLM makes when it loads the head's weight. A head tied to the
        embedding has no weight to load: without this call it would keep using the old copy after a reload. Experts are
        packed in place, but by vLLM 0.32 at the first load alone, and would be read in the wrong layout.
        """
        for layer in self.model_runner.get_model().modules():
            if hasattr(layer, "cpu_linear") and layer.weight.numel() > 0:
                layer.quant_method.process_weights_after_loading(layer)
            kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
            if kernel is not None and layer.w13_weight.device.type == "cpu":
                kernel.fused_experts.process_weights_after_loading(layer)

    def record_experts(self) -> None:
        """Record the experts of every token. vLLM 0.32 does it with a model runner that has no CPU form."""
        from vllm.model_executor.layers.fused_moe import routed_experts_capturer as capture

        runner, self._experts = self.model_runner, defaultdict(list)
        most = self.vllm_config.scheduler_config.max_num_batched_tokens
        capturer = capture.RoutedExpertsCapturer(most, self.vllm_config)
        capture.bind_routed_experts_capturer(runner.get_model(), capturer)
        execute = runner.execute_model

        def execute_and_record(scheduled: Any, *arguments: Any) -> Any:
            result, batch = execute(scheduled, *arguments), runner.input_batch
            counts = [scheduled.num_scheduled_tokens[name] for name in batch.req_ids]
            parts = capturer.snapshot_routing_data(sum(counts)).split(counts)
            for name, start, part in zip(batch.req_ids, batch.num_computed_tokens_cpu, parts, strict=False):
                self._experts[name.rpartition("-")[0]].append((int(start), part.numpy()))  # vLLM adds "-" and a number
            return result

        runner.execute_model = execute_and_record

    def take_experts(self) -> dict[str, NDArray[np.int16]]:
        """Collect the experts [L, layers, experts per token] of each request that `record_experts` recorded since the
        last call; -1 for cached tokens.
        """
        found = {}
        for name, parts in self._experts.items():
            whole = np.full((max(start + len(part) for start, part in parts), *parts[0][1].shape[1:]), -1, np.int16)
            for start, part in parts:  # again from the start after a preemption
                whole[start : start + len(part)] = part
            found[name] = whole
        self._experts = defaultdict(list)
        return found

    def load_adapter(self, tensors: Mapping[str, Tensor], form: Mapping[str, Any], number: int) -> str:
        """Replace the adapter by `tensors`, as `number`; return why it cannot be served, or "".

        `form` has the fields of peft's configuration that scale it. vLLM itself would leave out modules that it lacks.
        """
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        manager = self.model_runner.lora_manager._adapter_manager
        helper = PEFTHelper.from_dict({**form, "target_modules": []})
        try:
            helper.validate_legal(manager.lora_config)
        except ValueError as error:
            return str(error)
        renamed = getattr(manager.model, "hf_to_vllm_mapper", None)
        adapter = LoRAModel.from_lora_tensors(
            number,
            {name: tensor.clone() for name, tensor in tensors.items()},  # vLLM scales B in place
            helper,
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=renamed and renamed.get_rename_mapper(),
        )
        held = {*manager.modules, *(part for parts in manager.packed_modules.values() for part in parts)}
        if missing := sorted(adapter.loras.keys() - held):
            return f"vLLM has no adapters for {len(missing)} modules of this model, such as {missing[0]}"
        manager.remove_all_adapters()
        manager.add_adapter(adapter)
        manager.activate_adapter(number)
        return ""

    def mismatched_weights(self, probes: Probes) -> list[str]:
        """Names of tensors that differ from `probes`, among the tensors that this worker stores unchanged.

        Linear layers are fused, sharded or repacked; norms and, without tensor parallelism, embeddings are not.
        """
        held = dict(self.model_runner.get_model().named_parameters())
        return [
            name
            for name, (shape, rows) in probes.items()
            if name in held
            and _same_but_for_padding(tuple(held[name].shape), shape)
            and not torch.equal(_rows(held[name].detach()[: shape[0]]).cpu(), rows.to(held[name].dtype))
        ]


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Open all tensors of the safetensors files in `folder`; they stay on disk until they are read."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def probe_weights(tensors: Mapping[str, Tensor]) -> Probes:
    """Select some rows of the tensors that an engine may store unchanged: vectors, and the embedding."""
    return {
        name: (tuple(tensor.shape), _rows(tensor.detach()).float().cpu())
        for name, tensor in tensors.items()
        if tensor.ndim == 1 or (tensor.ndim == 2 and "embed" in name)
    }


def _rows(tensor: Tensor) -> Tensor:
    """Select about `PROBE_ROWS` rows, evenly spread over the first dimension."""
    return tensor[:: max(1, tensor.shape[0] // PROBE_ROWS)]


def _same_but_for_padding(held: tuple[int, ...], sent: tuple[int, ...]) -> bool:
    return len(held) == len(sent) and held[0] >= sent[0] and held[1:] == sent[1:]
