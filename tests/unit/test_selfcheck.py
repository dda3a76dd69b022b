"""The self-check's own arithmetic and its golden files."""

import json
import math
from pathlib import Path

import pytest

from server.config import Settings
from server.engine.selfcheck import DEMO_GOLDEN, SelfCheckError, golden_file, mean_difference, read_golden
from server.sections import EngineSettings, SelfCheckSettings


def test_mean_difference() -> None:
    """Mean of the absolute differences; other lengths are no match at all; NaN is never small."""
    assert mean_difference([1.0, -2.0], [1.5, -1.0]) == pytest.approx(0.75)
    assert mean_difference([1.0], [1.0, 2.0]) == math.inf
    assert not mean_difference([math.nan], [1.0]) <= 0.02


def test_demo_golden_is_complete() -> None:
    """One log-probability for each token but the first, margins above 1 nat."""
    for prompt in read_golden(DEMO_GOLDEN)["prompts"]:
        length = len(prompt["prompt_token_ids"]) + len(prompt["greedy_token_ids"])
        assert len(prompt["token_logprobs"]) == length - 1
        assert prompt["min_margin_nat"] > 1.0


@pytest.mark.parametrize(
    "text", ["", "{}", '{"prompts": []}', json.dumps({"prompts": [{"token_logprobs": []}]})]
)
def test_unusable_golden_file(tmp_path: Path, text: str) -> None:
    """One line that names the file."""
    path = tmp_path / "golden.json"
    path.write_text(text)
    with pytest.raises(SelfCheckError, match="can't be used"):
        read_golden(path)


def test_which_golden_file_counts() -> None:
    """The demo's own for unquantised demo weights, the one set above all, none for other models."""
    assert golden_file(Settings()) == DEMO_GOLDEN
    assert golden_file(Settings(engine=EngineSettings(model="a/b"))) is None
    assert golden_file(Settings(engine=EngineSettings(quantization="int8"))) is None
    own = Settings(selfcheck=SelfCheckSettings(golden=Path("own.json")))
    assert golden_file(own) == Path("own.json")
