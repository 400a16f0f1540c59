import importlib.util
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent.parent / "golden"


def load_script(name: str):
    """A script of the golden folder as a module."""
    spec = importlib.util.spec_from_file_location(name, GOLDEN / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def golden_script():
    return load_script("make_flash_sites")


@pytest.fixture(scope="session")
def flash_on_meta(golden_script):
    """transformers' own full-size model, without storage."""
    return golden_script.model_on_meta()
