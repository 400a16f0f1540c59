import pytest

from glm_lora.rollout import sglang_client


@pytest.fixture
def short_pauses(monkeypatch):
    """A client that asks again almost at once."""
    monkeypatch.setattr(sglang_client, "_PAUSE", 0.01)
