"""The importable library under the stages: types, store, losses, engines behind protocols."""

from rlhf_core.moved import find_former_names

find_former_names()
