"""The training step that ``oeprov`` tries a GPU with (``provision.node.gpucheck``), here on the CPU."""

from typing import Any

from provision.node import gpucheck


def test_the_step_learns_and_says_where_it_ran() -> None:
    space: dict[str, Any] = {"__name__": "step"}
    exec(gpucheck.STEP, space)  # noqa: S102
    found = space["main"]("CPU")
    (step,) = found["steps"][:1]
    assert step["losses"][-1] < step["losses"][0] < 0.8
    assert found["sum"] == len(found["steps"])
    count = len(found["steps"])
    assert gpucheck.judge(found, count) == f"the step for GPU 0 ran on {step['device']}"
    for item in found["steps"]:
        item["device"] = item["device"].replace("CPU", "GPU")
    assert not gpucheck.judge(found, count)
    assert "uses" in gpucheck.judge(found, count + 1)
