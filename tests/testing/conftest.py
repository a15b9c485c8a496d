import pytest

from ringcore.testing import write_model_config


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> str:
    """A config.json, and nothing else."""
    return write_model_config(tmp_path_factory.mktemp("fake-model"))
