"""The former name of `rlhf_contrib.environments.nemo_gym`."""

from rlhf_core.moved import moved

moved(__name__)
