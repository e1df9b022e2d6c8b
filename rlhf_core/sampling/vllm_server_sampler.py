"""The former name of `rlhf_contrib.vllm_server.sampler`."""

from rlhf_core.moved import moved

moved(__name__)
