import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # threads that wait for each other take longer than these small models


@pytest.fixture(scope="session", autouse=True)
def _leave_nothing(tmp_path_factory):
    """PyTorch makes this directory where its compiler is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield
