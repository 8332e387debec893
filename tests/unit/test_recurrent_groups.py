"""Models with recurrent layers, from real configurations: what a policy manages.

Also the models whose layers vLLM's CPU build cannot run. Without weights: the resolved
configuration, the groups that vLLM makes of the layers, and the size of blocks.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="install a vLLM (see scripts/)")

import transformers
from tiny_model import write_tokenizer
from tiny_recurrent import RECURRENT, config_of
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import ModelRegistry, registry
from vllm.v1.core.kv_cache_utils import _get_kv_cache_groups_uniform_page_size
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.errors import KVPolicyError, codes_in
from vllm_kvplugins.model_config import (
    FULL,
    STATE,
    ConfigOnlyModel,
    groups_of,
    read_model_config,
)
from vllm_kvplugins.model_memory import ModelMemory
from vllm_kvplugins.vllm_adapter.config import validation
from vllm_kvplugins.vllm_adapter.config.engine_config import (
    geometry_of,
    layer_types_of,
    policy_of,
)
from vllm_kvplugins.vllm_adapter.config.layer_groups import other_blocks
from vllm_kvplugins.vllm_adapter.scheduler.scheduler import group_problems
from vllm_kvplugins.vllm_adapter.scheduler.spec import with_policy

# vLLM imports the file of this model from torchvision, which the CPU set-up lacks.
RESOLVED = [name for name in RECURRENT if name != "Qwen3.5"]
ELSEWHERE = [name for name, model in RECURRENT.items() if not model.runs]


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    from vllm_kvplugins.plugin import register

    register()
    # vLLM looks at a class for the first time in a process of its own, for 20 seconds
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda look: look())
    # vLLM would reconfigure this process's loggers
    monkeypatch.setenv("VLLM_CONFIGURE_LOGGING", "0")
    environment = dict(os.environ)
    yield
    # vLLM's platform sets variables
    os.environ.clear()
    os.environ.update(environment)


def folder_of(tmp_path: Path, config: Any) -> str:
    config.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    return str(tmp_path)


def resolved(folder: str, policy: Any = "snapkv", **arguments: Any) -> Any:
    """vLLM's configuration of an engine under a policy."""
    defaults = {"dtype": "bfloat16", "max_model_len": 2048, "skip_tokenizer_init": True}
    return EngineArgs(
        model=folder,
        additional_config={"kv_policy": policy},
        **(defaults | arguments),
    ).create_engine_config()


def specs_of(config: Any) -> dict[str, Any]:
    """The specs of a model's layers as its classes make them, without weights."""
    model, cache = config.model_config, config.cache_config
    kinds = layer_types_of(config)
    model_class, _ = ModelRegistry.resolve_model_cls(
        model.architecture, model_config=model
    )
    attention = FullAttentionSpec(
        block_size=cache.block_size,
        num_kv_heads=model.get_num_kv_heads(config.parallel_config),
        head_size=model.get_head_size(),
        dtype=model.dtype,
    )
    state = MambaSpec(
        shapes=model_class.get_mamba_state_shape_from_config(config),
        dtypes=model_class.get_mamba_state_dtype_from_config(config),
        block_size=cache.mamba_block_size,
        page_size_padded=cache.mamba_page_size_padded,
        mamba_cache_mode=cache.mamba_cache_mode,
    )
    policy, geometry = policy_of(config), geometry_of(config)
    assert policy is not None
    managed = with_policy(attention, policy, geometry)
    return {str(i): managed if kind == FULL else state for i, kind in enumerate(kinds)}


def check_groups(config: Any) -> None:
    """One group of full attention, with pages as large as a recurrent state."""
    specs = specs_of(config)
    groups = _get_kv_cache_groups_uniform_page_size(specs)
    assert group_problems(type("", (), {"kv_cache_groups": groups})) == []
    kinds = [
        STATE if isinstance(group.kv_cache_spec, MambaSpec) else FULL
        for group in groups
    ]
    counts = groups_of(layer_types_of(config))
    assert {kind: kinds.count(kind) for kind in set(kinds)} == counts
    assert counts[FULL] == 1
    assert len({group.kv_cache_spec.page_size_bytes for group in groups}) == 1


@pytest.mark.parametrize("name", RESOLVED)
def test_one_group_holds_the_attention_of_tiny_models(tmp_path, name):
    folder = folder_of(tmp_path, config_of(name))
    config = resolved(folder, dtype=RECURRENT[name].dtype)
    assert config.cache_config.block_size == RECURRENT[name].block_size
    check_groups(config)


@pytest.mark.proves(
    architecture="name", policy=("full", "snapkv", "icecache"), note="not run on CPU"
)
@pytest.mark.parametrize("name", ELSEWHERE)
def test_layers_that_no_cpu_runs_have_one_group(tmp_path, name):
    """Groups of layers and size of blocks, from the configuration."""
    folder = folder_of(tmp_path, config_of(name))
    for policy in ("full", "snapkv", "icecache"):
        settings = {"skip_layers": 0} if policy == "icecache" else {}
        check_groups(resolved(folder, {"name": policy, **settings}))


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("name", RESOLVED)
def test_a_request_holds_few_states(tmp_path, name, caching):
    folder = folder_of(tmp_path, config_of(name))
    config = resolved(
        folder, dtype=RECURRENT[name].dtype, enable_prefix_caching=caching
    )
    state_groups = groups_of(layer_types_of(config))[STATE]
    assert config.cache_config.mamba_cache_mode == ("align" if caching else "none")
    assert other_blocks(config, 2000) == state_groups * (3 if caching else 1)


# Configuration classes whose defaults are the sizes of a released model; tokens per
# block in bfloat16, and the full layers of all.
REAL = {
    "JambaConfig": (4, 32),
    "Qwen3NextConfig": (12, 48),
    "OlmoHybridConfig": (8, 32),
    "FalconH1Config": (32, 32),
    "Zamba2Config": (9, 54),
}


@pytest.mark.parametrize("name", REAL)
def test_blocks_of_real_sizes_hold_a_state_and_whole_pages(tmp_path, name):
    full, layers = REAL[name]
    architecture = name.replace("Config", "ForCausalLM")
    config = getattr(transformers, name)(architectures=[architecture])
    run = resolved(folder_of(tmp_path, config))
    geometry = geometry_of(run)
    assert (geometry.num_layers, config.num_hidden_layers) == (full, layers)
    print(name, "tokens per block:", geometry.block_size)
    assert geometry.block_size > 32
    # `doctor` and `size` know it from the file alone
    memory = ModelMemory.of(read_model_config(str(tmp_path), "bfloat16"), 32)
    assert memory.geometry == geometry
    assert geometry.block_size % 32 == 0
    check_groups(run)


def test_what_vllm_enlarges_later_is_nothing(tmp_path):
    """It computes the size again when a worker has loaded the model."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    run = resolved(folder_of(tmp_path, config_of("Granite-4, large state")))
    cache = run.cache_config
    before = cache.block_size, cache.mamba_block_size, cache.mamba_page_size_padded
    assert before[0] > 32
    current_platform._align_hybrid_block_size(run, CPUAttentionBackend)
    after = cache.block_size, cache.mamba_block_size, cache.mamba_page_size_padded
    assert after == before


@pytest.mark.parametrize(
    ("policy", "arguments", "expected"),
    [
        ({"name": "kvzip"}, {}, {"KVP040"}),
        ({"name": "snapkv", "sessions": True}, {}, {"KVP044"}),
        ({"name": "flowkv"}, {}, {"KVP044"}),
        ({"name": "flowkv", "sessions": False}, {}, set()),
        ({"name": "snapkv"}, {"prefix_match_unit": 32}, {"KVP047"}),
        ({"name": "snapkv"}, {"prefix_match_unit": 64}, set()),
        ({"name": "snapkv"}, {"block_size": 48}, {"KVP020"}),
        ({"name": "expected-attention"}, {}, set()),
        (
            {"name": "snapkv"},
            {"disable_hybrid_kv_cache_manager": True},
            {"KVP042"},
        ),
    ],
    ids=str,
)
def test_what_does_not_work_is_refused(tmp_path, policy, arguments, expected):
    folder = folder_of(tmp_path, config_of("Granite-4"))
    start = EngineArgs(
        model=folder,
        dtype="float32",
        max_model_len=2048,
        skip_tokenizer_init=True,
        additional_config={"kv_policy": policy},
        **arguments,
    )
    if not expected:
        assert start.create_engine_config() is not None
        return
    with pytest.raises(KVPolicyError) as refused:
        start.create_engine_config()
    assert set(codes_in(str(refused.value))) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"layer_types": ["mamba"] * 3}, ["KVP013"]),
        ({"layer_types": ["full_attention", "some_attention", "mamba"]}, ["KVP013"]),
        ({"layer_types": ["full_attention", "mlp", "mamba"]}, []),
        ({"mamba_d_state": 16}, ["KVP013"]),  # says that there are some, not which
        ({"layer_types": ["full_attention"] * 2 + ["mamba"]}, ["KVP043"]),
    ],
)
def test_layers_that_a_policy_cannot_tell_apart_are_refused(fields, expected):
    values = {"num_hidden_layers": 3, "num_attention_heads": 4} | fields
    model = ConfigOnlyModel("m", "torch.float32", values)
    snapkv = parse_policy({"name": "snapkv"})
    found = [
        *validation.model_problems(model),
        *validation.hybrid_problems(model.layer_types, snapkv, model),
    ]
    assert list(codes_in("\n".join(found))) == expected


def test_offline_training_refuses_recurrent_layers():
    values = {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]}
    model = ConfigOnlyModel("m", "torch.float32", values)
    assert validation.model_problems(model) == []
    assert codes_in("\n".join(validation.training_problems(model))) == ("KVP013",)


def test_sizes_of_a_file_cover_the_attention(tmp_path):
    folder = folder_of(tmp_path, config_of("Nemotron-H"))
    file = read_model_config(folder, "float32")
    run = resolved(folder, dtype="float32")
    geometry = geometry_of(run)
    assert file.layer_types == layer_types_of(run)
    shape = file.cache_shape()
    assert shape.num_layers == 6
    assert (shape.num_kv_heads, file.layer_types.count(FULL)) == (
        geometry.num_kv_heads,
        geometry.num_layers,
    )
