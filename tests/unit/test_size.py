"""``kvplugins size``: the figures, the limits, and the refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_settings import EACH_KIND, needs_profile, wants_history, write_heads
from tiers import tiered
from typer.testing import CliRunner

from vllm_kvplugins import recurrent_states
from vllm_kvplugins.amounts import amount
from vllm_kvplugins.cli import app
from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.errors import KVPolicyError, codes_in
from vllm_kvplugins.model_config import ConfigOnlyModel
from vllm_kvplugins.plan.geometry import Geometry, Lengths
from vllm_kvplugins.plan.residency_plan import ResidencyPlan
from vllm_kvplugins.plan.sizing import Footprint, Limit, blocks_for, capacity, footprint
from vllm_kvplugins.policies import available_policies

runner = CliRunner()
ROOT = Path(__file__).parents[2]
GIB = 1 << 30
# Fields of Llama 3.1 8B that matter: 32 * 8 * 128 * 2 * 2 = 131072 bytes per token.
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return str(tmp_path)


def run(*arguments: str, context: int = 32000, policy: str = "snapkv"):
    fixed = ("--context", str(context), "--policy", policy)
    return runner.invoke(app, ["size", *arguments, *fixed])


def figures(*arguments: str, **options):
    done = run(*arguments, "--json", **options)
    assert done.exit_code in (0, 1), done.output
    return json.loads(done.stdout)


# -- figures computed by hand --------------------------------------------------------


def test_request_figuresof_snapkv_on_an_8b_model(folder):
    result = figures(folder, "--answer", "1000", "--concurrency", "10")
    assert result["kv_bytes_per_token"] == 131072
    assert result["block_bytes"] == 32 * 131072 == 4 << 20
    blocks = {
        key: request_figures["blocks"]
        for key, request_figures in result["stock_request"].items()
    }
    # 32000 = 1000 blocks; the answer's last token is never computed
    assert blocks == {
        "full": 1032,
        "prefill_peak": 1000,
        "after_prefill": 1000,
        "decode_peak": 1032,
        "end": 1032,
    }
    request_figures = result["request"]
    assert request_figures.pop("host_bytes") == 0
    assert request_figures.pop("device_bytes") == 0
    blocks = {key: amounts["blocks"] for key, amounts in request_figures.items()}
    assert blocks == {
        "full": 1032,
        "prefill_peak": 1000,  # the whole prompt, with any budget
        "after_prefill": 16,
        "decode_peak": 48,
        "end": 48,
    }
    assert all(a["bytes"] == a["blocks"] * (4 << 20) for a in request_figures.values())
    # nine decode while the tenth prefills; the null block is never allocated
    assert result["wanted"]["pool_bytes"] == (9 * 48 + 1000 + 1) * (4 << 20)
    assert result["wanted"]["stock_pool_bytes"] == (10 * 1032 + 1) * (4 << 20)
    assert result["pool"] is None


def test_a_pool_holds_requests_until_the_next_prefill_does_not_fit(folder):
    options = ("--answer", "1000", "--pool-gib", "20", "--concurrency", "86")
    done = run(folder, *options)
    pool = figures(folder, *options)["pool"]
    assert pool["blocks"] == 20 * 256 - 1
    assert pool["decoding_alone"] == 5119 // 48 == 106
    assert pool["requests"] == (5119 - 1000) // 48 + 1 == 86
    assert pool["limit"] == "prefill"
    assert (pool["stock_requests"], pool["stock_limit"]) == (4, "decoding")
    assert done.exit_code == 0
    assert "86 requests at once" in done.stdout
    assert "(ratio 21.5)" in done.stdout
    assert "3.91 GiB in addition to the decoding requests" in done.stdout


def test_decode_budgets_count_their_longest_moment(folder):
    settings = '{"budget": 512, "decode_budget": 512, "fold_blocks": 4}'
    request_figures = figures(folder, "--answer", "2000", "--policy-config", settings)[
        "request"
    ]
    assert request_figures["after_prefill"]["blocks"] == 16
    assert request_figures["decode_peak"]["blocks"] == 20, (
        "four blocks fill before they fold"
    )
    assert request_figures["end"]["blocks"] <= 20


def test_retrieval_says_what_lies_on_the_host(folder):
    config = '{"host_memory": "6GiB"}'
    options = ("--policy-config", config, "--pool-gib", "40")
    result = figures(folder, *options, policy="exact-topk")
    tokens = 32000 + 512 - 16 - 64
    assert result["request"]["host_bytes"] == tokens * 131072 * 30 // 32
    assert result["pool"]["limit"] == "host-memory"
    assert result["pool"]["requests"] == 1
    done = run(folder, *options, "--concurrency", "2", policy="exact-topk")
    assert done.exit_code == 1
    assert "raise host_memory" in done.stdout
    notes = figures(folder, policy="exact-topk")["notes"]
    assert any("host_memory is not set" in note for note in notes)


# -- what no policy can help with ----------------------------------------------------


def test_a_prompt_larger_than_the_pool_never_runs(folder):
    done = run(folder, "--pool-gib", "3")
    assert done.exit_code == 1
    assert "the prefill of one prompt needs 3.91 GiB, more than the pool" in done.stdout
    assert figures(folder, "--pool-gib", "3")["pool"]["requests"] == 0


def test_vllm_wants_room_for_one_whole_request(folder):
    """vLLM checks this at start-up, without regard to blocks that a policy frees."""
    options = ("--answer", "32000", "--pool-gib", "6")
    pool = figures(folder, *options)["pool"]
    assert pool["limit"] == "start-up"
    assert pool["requests"] == 0 < pool["decoding_alone"]
    assert "--max-model-len" in run(folder, *options).stdout


def test_a_prompt_read_in_blocks_fits_a_pool_smaller_than_itself(folder):
    """32,000 tokens are 3.9 GiB; 2048 and 2048 of them are half a GiB."""
    settings = {"budget": 2048, "decode_budget": 2048}
    whole = figures(folder, "--pool-gib", "1", "--policy-config", json.dumps(settings))
    assert whole["pool"]["requests"] == 0
    assert whole["pool"]["limit"] == "prefill-never-fits"
    settings["prefill_block"] = 2048
    result = figures(folder, "--pool-gib", "1", "--policy-config", json.dumps(settings))
    assert result["request"]["prefill_peak"]["blocks"] == 4096 // 32
    assert result["pool"]["requests"] == 2
    assert result["pool"]["limit"] == "prefill"
    # vLLM starts with a partly full block and the null block
    smallest = result["wanted"]["pool_bytes"] // result["block_bytes"]
    assert smallest == 4096 // 32 + 1 + 1


def test_a_history_holds_budget_and_block(folder):
    request_figures = figures(folder, "--answer", "2", policy="epicache")["request"]
    assert request_figures["prefill_peak"]["blocks"] == (1024 + 512) // 32
    assert request_figures["after_prefill"]["blocks"] < 48
    assert "all history" in run(folder, policy="epicache").output


@pytest.mark.parametrize("name", tiered(available_policies(), EACH_KIND))
def test_every_policy_has_figures(folder, tmp_path, name):
    extra = []
    if needs_profile(name):
        allocator = write_heads(tmp_path / "heads.json", Path(folder))
        extra = ["--policy-config", json.dumps({"allocator": allocator})]
    request_figures = figures(folder, *extra, context=2000, policy=name)["request"]
    peak = 48 if wants_history(name) else 63
    assert request_figures["prefill_peak"]["blocks"] == peak
    assert request_figures["decode_peak"]["blocks"] <= request_figures["full"]["blocks"]
    assert run(folder, *extra, context=2000, policy=name).exit_code == 0


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.integers(1, 3000),
    answer=st.integers(2, 600),
    budget=st.integers(1, 900),
    folds=st.booleans(),
)
def test_no_step_needs_more_than_the_peaks(prompt, answer, budget, folds):
    request = {"name": "random", "budget": budget}
    if folds:
        request["decode_budget"] = budget
    plan = parse_policy(request).plan(Lengths(prompt), Geometry(32, 2, 2, 512))
    held = footprint(plan, prompt, answer)
    last = prompt + answer - 1
    assert max(held.prefill_peak, held.decode_peak) >= plan.peak_blocks(last)
    steps = range(prompt, last)  # tokens computed before each
    assert held.decode_peak == max(
        plan.resident_blocks(before) + (before % 32 == 0) for before in steps
    )
    assert held.after_prefill <= held.decode_peak + 1
    assert held.end <= held.decode_peak <= held.full
    whole = footprint(ResidencyPlan(32), prompt, answer)
    assert whole.decode_peak == whole.end == whole.full


@given(
    prefill=st.integers(1, 50),
    decode=st.integers(1, 60),
    positions=st.integers(1, 70),
    requests=st.integers(1, 40),
)
def test_the_smallest_pool_for_some_requests_is_the_smallest(
    prefill, decode, positions, requests
):
    held = Footprint(positions, prefill, decode, decode, decode, positions)
    needed = blocks_for(held, requests)
    assert capacity(held, needed, 1, None).requests >= requests
    assert capacity(held, needed - 1, 1, None).requests < requests
    assert capacity(held, needed, 1, 0).limit is Limit.HOST_MEMORY


# -- config.json ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (LLAMA_8B, (32, 8, 128)),
        (LLAMA_8B | {"head_dim": 64}, (32, 8, 64)),
        (LLAMA_8B | {"head_dim": None}, (32, 8, 128)),
        ({"n_layer": 12, "n_head": 12, "n_embd": 768}, (12, 12, 64)),
        ({"vision_config": {}, "text_config": LLAMA_8B}, (32, 8, 128)),
        (
            {
                "num_hidden_layers": 2,
                "num_attention_heads": 8,
                "hidden_size": 512,
                "multi_query": True,
            },
            (2, 1, 64),
        ),
        (
            {
                "n_layers": 2,
                "n_heads": 8,
                "d_model": 512,
                "attn_config": {"kv_n_heads": 4},
            },
            (2, 4, 64),
        ),
    ],
)
def test_shapes_under_the_names_that_families_use(config, shape):
    result = ConfigOnlyModel("m", "torch.bfloat16", config).cache_shape()
    assert (result.num_layers, result.num_kv_heads, result.head_dim) == shape


def test_a_file_without_a_shape_is_refused():
    for config in ({}, {"n_layer": 2}, LLAMA_8B | {"block_configs": [{}]}):
        with pytest.raises(KVPolicyError, match=r"num_|block_configs"):
            ConfigOnlyModel("m", "torch.bfloat16", config).cache_shape()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_lora_rank": 512}, "latent attention (MLA)"),
        ({"sliding_window": 4096}, "KVP012"),
        ({"attention_chunk_size": 8192}, "KVP012"),
        (
            {
                "layer_types": ["full_attention", "full_attention", "sliding_attention"]
                * 10,
                "sliding_window": 4096,
            },
            "KVP043",
        ),
        ({"layer_types": ["full_attention", "some_attention"] * 16}, "KVP013"),
        ({"layer_types": ["mamba"] * 32}, "KVP013"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"alibi": True}, "KVP016"),
        ({"num_kv_shared_layers": 10}, "KVP018"),
    ],
)
def test_models_that_the_engine_refuses_are_refused(tmp_path, change, words):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | change))
    done = run(str(tmp_path))
    assert done.exit_code == 1
    assert words in done.stderr


@pytest.mark.parametrize("policy", ["quest", "sekv", "expected-attention"])
def test_capped_logits_are_refused_where_a_policy_does_not_model_them(tmp_path, policy):
    config = LLAMA_8B | {"attn_logit_softcapping": 50.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run(str(tmp_path)).exit_code == 0
    done = run(str(tmp_path), policy=policy)
    assert done.exit_code == 1
    assert "KVP015" in done.stderr


def test_figures_of_a_hybrid_cover_the_full_attention_layers(tmp_path):
    config = LLAMA_8B | {"sliding_window": 4096, "sliding_window_pattern": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    hybrid = figures(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    plain = figures(str(tmp_path))
    assert (hybrid["num_layers"], plain["num_layers"]) == (8, 32)
    assert 4 * hybrid["block_bytes"] == plain["block_bytes"]
    assert any("24 of 32 layers" in note for note in hybrid["notes"])


DELTA_NET = {
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}


@pytest.mark.parametrize(
    ("widened", "element_bytes", "tokens"), [(True, 4, 544), (False, 2, 288)]
)
def test_figures_of_a_recurrent_model_contain_its_states(
    tmp_path, monkeypatch, widened, element_bytes, tokens
):
    # as vLLM on CPUs with AVX512-BF16, and elsewhere
    monkeypatch.setattr(recurrent_states, "_cpu_widens_states", lambda: widened)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | DELTA_NET))
    recurrent = figures(str(tmp_path))
    assert recurrent["num_layers"] == 8
    assert any("24 layers keep a recurrent state" in n for n in recurrent["notes"])
    # the inputs of the convolution are bfloat16; a layer has 4 KiB per token
    state_tokens = (32 * 128 * 128 * element_bytes + 3 * 8192 * 2) / 4096
    assert recurrent["block_size"] == 32 * -(-state_tokens // 32) == tokens
    managed = -(-(32000 + 511) // tokens)
    assert recurrent["stock_request"]["end"]["blocks"] == managed + 3 * 3


def test_states_of_unknown_size_are_refused(tmp_path):
    change = DELTA_NET | {"linear_key_head_dim": None}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | change))
    done = run(str(tmp_path))
    assert done.exit_code == 1
    assert "KVP629" in done.stderr


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": 4096, "use_sliding_window": False},
        {"sliding_window": None},
        {"layer_types": ["full_attention"] * 32},
    ],
)
def test_models_with_a_window_switched_off_are_not(tmp_path, change):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | change))
    assert run(str(tmp_path)).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "value"),
    [
        (["--policy", "snapkw"], "KVP100", "snapkw"),
        (["--policy-config", "{budget"], "KVP028", "{budget"),
        (["--policy-config", '{"windw": 3}'], "KVP036", "windw"),
        (["--policy-config", '{"budget": 10}'], "", "budget 10"),
        (["--dtype", "fp8"], "KVP603", "fp8"),
        (["--dtype", "auto"], "KVP603", "auto"),
        (["--block-size", "16"], "KVP020", "16"),
        (["--policy", "exact-topk", "--dtype", "float16"], "KVP030", "float16"),
        (
            ["--policy", "exact-topk", "--policy-config", '{"skip_layers": 32}'],
            "",
            "skip_layers 32",
        ),
        (
            ["--policy", "exact-topk", "--policy-config", '{"host_memory": "1GiB"}'],
            "KVP501",
            "host_memory",
        ),
    ],
)
def test_mistakes_give_one_message(folder, arguments, code, value):
    done = runner.invoke(
        app, ["size", folder, "--context", "32000", "--policy", "snapkv", *arguments]
    )
    assert done.exit_code == 1
    assert done.stderr.startswith("error: ")
    assert isinstance(done.exception, SystemExit), "another exception escaped"
    if code:
        assert code in codes_in(done.stderr)
    assert value in done.stderr


@pytest.mark.parametrize("model", ["nobody/no-such-model", "a/b/c/d"])
def test_unknown_models_say_how_to_get_the_file(model):
    done = run(model)
    assert done.exit_code == 1
    assert f"hf download {model} config.json" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--pool-gib", "nan"],
        ["--pool-gib", "inf"],
        ["--pool-gib", "-1"],
        ["--answer", "1"],
        ["--context", "0"],
        ["--concurrency", "0"],
    ],
)
def test_numbers_that_mean_nothing_are_refused(folder, arguments):
    done = runner.invoke(
        app, ["size", folder, "--policy", "snapkv", "--context", "9", *arguments]
    )
    assert done.exit_code == 2
    assert arguments[0] in done.stderr


def test_broken_files_are_named(tmp_path):
    assert codes_in(run(str(tmp_path)).stderr) == ("KVP628",)
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        done = run(str(tmp_path))
        assert codes_in(done.stderr) == ("KVP628",)
        assert str(tmp_path / "config.json") in done.stderr


def test_a_model_in_the_hugging_face_cache_is_found(folder, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    path = str(Path(folder, "config.json"))
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda model, name: path)
    assert figures("org/model")["kv_bytes_per_token"] == 131072


def test_more_tokens_than_positions_are_noted(folder):
    notes = figures(folder, context=140_000)["notes"]
    assert any("131072 positions" in note for note in notes)


def test_it_runs_without_vllm(folder):
    code = (
        "import sys; sys.modules['vllm'] = None\n"
        "from vllm_kvplugins.cli import main\n"
        f"sys.argv = ['kvplugins', 'size', {folder!r}, '--context', '9999', "
        "'--policy', 'snapkv', '--json']\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["policy"] == "snapkv"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (1536, "1.50 KiB"), (1024 * GIB, "1,024.00 GiB")],
)
def test_amounts(num_bytes, text):
    assert amount(num_bytes) == text


# -- shared prefixes -------------------------------------------------------------------


def test_a_shared_prefix_counts_once(folder):
    """Behind it, a request holds what a prompt of the rest holds."""
    many = ("--concurrency", "100", "--answer", "100")
    rest = figures(folder, *many, context=2048)
    result = figures(folder, *many, "--shared-prefix", "2048", context=4096)
    setting = ("--policy-config", json.dumps({"shared_prefix": 2048}))
    by_setting = figures(folder, *many, *setting, context=4096)
    assert result["shared_blocks"] == by_setting["shared_blocks"] == 64
    assert result["wanted"] == by_setting["wanted"]
    for stage in ("prefill_peak", "after_prefill", "decode_peak", "end"):
        own = rest["request"][stage]["blocks"]
        assert result["request"][stage]["blocks"] == own + 64, stage
    block_bytes = result["block_bytes"]
    for pool in ("pool_bytes", "stock_pool_bytes"):
        once = rest["wanted"][pool] + 64 * block_bytes
        assert result["wanted"][pool] == once, pool
    apart = figures(folder, *many, context=4096)
    assert result["wanted"]["stock_pool_bytes"] < apart["wanted"]["stock_pool_bytes"]


def test_a_pool_holds_a_shared_prefix_once(folder):
    options = ("--answer", "100", "--shared-prefix", "2048", "--pool-gib")
    pool = figures(folder, *options, "4", context=4096)["pool"]
    rest = figures(folder, "--answer", "100", "--pool-gib", "3.75", context=2048)
    assert pool["requests"] == rest["pool"]["requests"]  # 2048 tokens are 0.25 GiB
    assert pool["stock_requests"] == rest["pool"]["stock_requests"]
    tiny = figures(folder, *options, "0.1", context=4096)["pool"]
    assert tiny["requests"] == tiny["stock_requests"] == 0


def test_a_policy_that_shares_no_prefix_is_refused(folder):
    done = run(folder, "--shared-prefix", "64", policy="exact-topk")
    assert done.exit_code == 1
    assert codes_in(done.output) == ("KVP050",)
