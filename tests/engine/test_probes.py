"""KVzip and InfiniPot keep the tokens that transformers' attention implies.

Their probes run in the engine, after the prompt, without changing the cache. The
reference runs prompt and probe as one sequence and reads whole attention matrices.
"""

from __future__ import annotations

import os

import pytest
from harness import run_scenario
from kept_positions import agreement

pytestmark = pytest.mark.engine

SEED = 41
LENGTHS = [333, *([608] if os.environ.get("KVP_TEST_TIER") == "all" else [])]
POLICIES = {
    "kvzip": {
        "name": "kvzip",
        "budget": 192,
        "chunk": 256,
        "allocator": "uniform",  # so that the reference does not allocate that much
    },
    "infinipot": {"name": "infinipot", "budget": 192},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["kvzip", pytest.param("infinipot", marks=pytest.mark.slow)]
)
def test_kept_positions_are_the_references(model_path, name):
    print("seed", SEED)
    runs = run_scenario(
        "scenarios_probe:kept_and_wanted",
        {
            "model": model_path,
            "policy": POLICIES[name],
            "seed": SEED,
            "lengths": LENGTHS,
            "max_model_len": 4096,
            "max_num_batched_tokens": 512,  # prompts are prefilled in chunks
        },
    )
    assert set(runs) == {str(n) for n in LENGTHS}
    for length, run in runs.items():
        agree = agreement(run["kept"], run["scores"], int(length))
        print(length, "agreement", agree)
        assert agree > 0.995
