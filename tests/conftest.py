"""What every test shares: threads, hypothesis profiles, and skips for what a machine lacks."""

import os

import pytest
from hypothesis import settings

# No deadline: a shared machine stalls now and then. CI draws the same examples every time.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_configure() -> None:
    """Before a test module imports torch or matplotlib; commands a test starts inherit it."""
    os.environ.setdefault("MPLBACKEND", "agg")
    os.environ.setdefault("DLRM_MEND_STRICT", "1")  # errors of mending itself are raised
    # Under -n N, workers with a thread for every core each would get in each other's way.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes go by their argument's name: gzip writes the time, and workers must agree on ids."""
    return argname if isinstance(val, bytes) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked gpu, with the reason, where torch sees no CUDA device."""
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch sees none here"))
