"""The former name of `rlhf_contrib.ray_jobs.executor`."""

from rlhf_core.moved import moved

moved(__name__)
