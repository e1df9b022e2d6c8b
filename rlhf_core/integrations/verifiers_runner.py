"""The former name of `rlhf_contrib.environments.verifiers_runner`."""

from rlhf_core.moved import moved

moved(__name__)
