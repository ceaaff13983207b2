"""A bug of capture must not hide behind its fallback to Python."""

import pytest


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLRM_CAPTURE_STRICT", "1")
