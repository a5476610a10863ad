import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # threads that wait for each other take longer than these small models
