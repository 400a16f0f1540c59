import pytest

from tests.tiny_checkpoint import write_checkpoint


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("base"))
