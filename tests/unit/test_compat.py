"""Messages about an unknown vLLM version, or a changed vLLM."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm", reason="install a vLLM (see scripts/)")

import torch
from vllm.config import CUDAGraphMode

from vllm_kvplugins.errors import KVPolicyError, codes_in
from vllm_kvplugins.vllm_adapter.config import compat
from vllm_kvplugins.vllm_adapter.config.seams import Seam, all_seams

# Every place where the product overrides one of vLLM's methods.
OVERRIDING = [
    "attention.cpu:PagedPolicyBackend",
    "attention.cpu:PagedPolicyImpl",
    "attention.cpu:PagedPolicyMetadataBuilder",
    "attention.flash:FlashPolicyBackend",
    "attention.flash:FlashPolicyBuilder",
    "attention.flash:FlashPolicyImpl",
    "attention.flashinfer:FlashInferPolicyBackend",
    "attention.flashinfer:FlashInferPolicyBuilder",
    "attention.flashinfer:FlashInferPolicyImpl",
    "attention.triton:TritonPolicyBackend",
    "attention.triton:TritonPolicyBuilder",
    "attention.triton:TritonPolicyImpl",
    "scheduler.block_manager:ResidencyBlockManager",
    "scheduler.composed_connector:ComposedConnector",
    "scheduler.connector:KVPolicyConnector",
    "scheduler.metrics:PolicyPromMetrics",
    "scheduler.metrics:PolicyStats",
    "scheduler.scheduler:KVPolicyAsyncScheduler",
    "scheduler.scheduler:KVPolicyScheduler",
    "scheduler.spec:ResidencySpec",
    "worker.cpu_worker:KVPolicyCPUWorker",
    "worker.gpu_worker:KVPolicyGPUWorker",
]


def test_the_installed_vllm_has_every_seam():
    assert compat.problems() == []


def test_the_page_for_vllm_counts_the_names_that_are_used():
    def names(seams: list[Seam]) -> set[tuple[str, str]]:
        pattern = r"(\w+)(?:\([^)]*\))?"
        return {(s.where, name) for s in seams for name in re.findall(pattern, s.uses)}

    page = (Path(__file__).parents[2] / "docs" / "upstream.md").read_text("utf-8")
    stated = re.search(
        r"uses (\d+) names of vLLM.*?\((\d+) on a CPU, (\d+) on\s+a GPU\)", page, re.S
    )
    assert stated is not None
    cpu, gpu = names(all_seams(True)), names(all_seams(False))
    assert list(map(int, stated.groups())) == [len(cpu | gpu), len(cpu), len(gpu)]


def test_the_seams_name_what_they_are_for():
    seams = all_seams(on_cpu=True)
    assert len({seam.where for seam in seams}) == len(seams) > 30
    for seam in seams:
        assert seam.uses, f"{seam.where} asks for nothing"


@pytest.mark.parametrize("version", ["0.31.0", "0.40.0", "0.3.2", "0.320.1", "dev"])
def test_an_unknown_version_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, version: str
):
    monkeypatch.setattr(compat, "vllm_version", lambda: version)
    (problem,) = compat.problems()
    assert codes_in(problem) == ("KVP001",)
    assert version in problem
    for known in compat.KNOWN_VERSIONS:
        assert known in problem


@pytest.mark.parametrize(
    "version", ["0.32.0", "0.32.1.dev0+cpu", "0.33.0", "0.33.0rc1"]
)
def test_a_known_version_is_accepted_with_any_suffix(
    monkeypatch: pytest.MonkeyPatch, version: str
):
    monkeypatch.setattr(compat, "vllm_version", lambda: version)
    assert compat.problems() == []


def test_a_missing_parameter_is_reported_with_its_name(
    monkeypatch: pytest.MonkeyPatch,
):
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    def remove_skipped_blocks(self, request_id, processed_computed_tokens):
        """A function with an older signature."""

    monkeypatch.setattr(
        FullAttentionManager, "remove_skipped_blocks", remove_skipped_blocks
    )
    (problem,) = compat.problems()
    assert (
        "FullAttentionManager.remove_skipped_blocks no longer takes num_prompt_tokens"
        in problem
    )
    assert "reinstall vLLM" in problem


def test_everything_that_is_gone_is_reported_at_once(monkeypatch: pytest.MonkeyPatch):
    from vllm.v1.attention import selector
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    monkeypatch.delattr(Scheduler, "_reserve_prefill_lookahead")
    monkeypatch.delattr(KVCacheSpecRegistry, "_ensure_registered")
    monkeypatch.delattr(selector, "_cached_get_attn_backend")
    problems = "\n".join(compat.problems())
    for gone in (
        "Scheduler no longer has _reserve_prefill_lookahead",
        "AsyncScheduler no longer has _reserve_prefill_lookahead",
        "KVCacheSpecRegistry no longer has _ensure_registered",
        "selector no longer has _cached_get_attn_backend",
    ):
        assert gone in problems


class Holder:
    limit = 3
    size: int

    def __init__(self) -> None:
        self.assigned = 1

    def act(self, first: int, *, second: int = 0) -> None:
        """A function that does nothing."""


@pytest.mark.parametrize(
    ("uses", "problem"),
    [
        ("act(first second) limit size assigned", None),
        ("act(first third fourth)", "Holder.act no longer takes third, fourth"),
        ("vanish()", "Holder no longer has vanish"),
        ("vanished", "Holder no longer has vanished"),
        ("assigned()", "Holder no longer has assigned"),
    ],
)
def test_a_seam_tells_what_it_misses(uses: str, problem: str | None):
    seam = Seam(f"{__name__}:Holder", uses)
    assert list(seam.problems()) == ([] if problem is None else [problem])


def test_a_module_or_class_that_is_gone_is_one_problem():
    (module,) = Seam("vllm.no_such_module:Thing", "a b c()").problems()
    assert "vllm.no_such_module cannot be imported" in module
    (cls,) = Seam(f"{__name__}:NoSuchClass", "a b c()").problems()
    assert cls.endswith("no longer has NoSuchClass")


# -- our side of the seams -----------------------------------------------------------


def overrides() -> Iterator[tuple[str, inspect.Signature, inspect.Signature]]:
    """Our overrides of vLLM's methods: name, our signature, vLLM's signature."""
    from importlib import import_module

    for place in OVERRIDING:
        module, _, name = place.partition(":")
        cls = getattr(import_module(f"vllm_kvplugins.vllm_adapter.{module}"), name)
        ours = [c for c in cls.__mro__ if c.__module__.startswith("vllm_kvplugins")]
        vllm_classes = [c for c in cls.__mro__ if c.__module__.startswith("vllm.")]
        for owner, method in ((c, m) for c in ours for m in vars(c)):
            base = next((c for c in vllm_classes if method in vars(c)), None)
            if base is None or not callable(getattr(owner, method)):
                continue
            if method.startswith("__") and is_dataclass(owner):
                continue  # generated by dataclasses
            yield (
                f"{owner.__name__}.{method}",
                inspect.signature(getattr(owner, method)),
                inspect.signature(getattr(base, method)),
            )


def refused_arguments(ours: inspect.Signature, theirs: inspect.Signature) -> list[str]:
    """Parameters of vLLM's method with which our override cannot be called."""
    own, kinds = ours.parameters, inspect.Parameter
    any_name = any(p.kind is kinds.VAR_KEYWORD for p in own.values())
    any_place = any(p.kind is kinds.VAR_POSITIONAL for p in own.values())
    places = [
        p
        for p in own.values()
        if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]
    refused = []
    for index, parameter in enumerate(theirs.parameters.values()):
        if parameter.kind is kinds.VAR_POSITIONAL:
            fits = any_place
        elif parameter.kind is kinds.VAR_KEYWORD:
            fits = any_name
        elif parameter.kind is kinds.KEYWORD_ONLY:
            fits = any_name or parameter.name in own
        else:
            fits = any_place or index < len(places)
        if not fits:
            refused.append(parameter.name)
    return refused


def test_overrides_take_whatever_vllm_may_pass():
    """0.33 added a positional parameter to a method; overrides must accept such
    changes.
    """
    seen = list(overrides())
    names = [name for name, _, _ in seen]
    assert "ResidencyScheduling._get_local_prefix_cache_hit" in names
    assert "ResidencyBlockManager.remove_skipped_blocks" in names
    refused = {
        name: missing
        for name, ours, theirs in seen
        if (missing := refused_arguments(ours, theirs))
    }
    assert refused == {}


@pytest.mark.parametrize(
    ("ours", "theirs", "refused"),
    [
        (lambda a, *args: None, lambda a, b=1: None, []),
        (lambda a: None, lambda a, b=1: None, ["b"]),
        (lambda a: None, lambda a, *, b: None, ["b"]),
        (lambda a, **kwargs: None, lambda a, *, b: None, []),
    ],
)
def test_the_comparison_of_signatures(ours, theirs, refused):
    signatures = inspect.signature(ours), inspect.signature(theirs)
    assert refused_arguments(*signatures) == refused


# -- rows ------------------------------------------------------------------------------


def metadata(req_idx: list[int] | None = None, padding: int = 0) -> SimpleNamespace:
    """Two rows: request 1 computes 3 tokens after 5, request 0 its 9th token."""
    return SimpleNamespace(
        num_reqs=2 + padding,
        query_start_loc_cpu=torch.tensor([0, 3, 4] + [4] * padding),
        seq_lens_cpu_upper_bound=torch.tensor([8, 9] + [0] * padding),
        req_idx=req_idx,
    )


def runner_v1() -> SimpleNamespace:
    batch = SimpleNamespace(req_ids=["b", "a"], num_prompt_tokens=[20, 8, 7])
    runner = SimpleNamespace(input_batch=batch)
    runner._dummy_run = lambda ask: ask()
    return runner


def runner_v2(disabled: bool = False) -> SimpleNamespace:
    states = SimpleNamespace(
        index_to_req_id={0: "a", 1: "b", 2: "waits"},
        prompt_len=SimpleNamespace(np=torch.tensor([8, 20, 7]).numpy()),
    )
    connector = SimpleNamespace(_disabled=disabled)
    return SimpleNamespace(req_states=states, kv_connector=connector)


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("runner", [runner_v1(), runner_v2()], ids=["v1", "v2"])
def test_rows_of_both_runners_say_the_same(runner: SimpleNamespace, padding: int):
    numbered = metadata(np.array([1, 0]), padding)
    rows = compat.runner_adapter(runner).rows(numbered)
    seen = [
        (r.request_id, r.prompt_tokens, r.computed_tokens, r.new_tokens, r.first_query)
        for r in rows
    ]
    assert seen == [("b", 20, 5, 3, 0), ("a", 8, 8, 1, 3)]


def test_a_dummy_batch_is_not_mistaken_for_the_requests_of_the_runner():
    runner = runner_v1()
    adapter = compat.runner_adapter(runner)
    assert runner._dummy_run(lambda: adapter.rows(metadata())) == []
    assert len(adapter.rows(metadata())) == 2, "the request ended"
    with pytest.raises(ZeroDivisionError):
        runner._dummy_run(lambda: 1 / 0)
    assert len(adapter.rows(metadata())) == 2, "the request ended with an error"
    numbered = metadata(np.array([0, 1]))
    assert compat.runner_adapter(runner_v2(disabled=True)).rows(numbered) == []
    warm_up = metadata(np.array([0, 7]))
    assert compat.runner_adapter(runner_v2()).rows(warm_up) == []
    assert compat.runner_adapter(runner_v2()).rows(metadata()) == []


def test_a_drafter_on_v2_has_the_requests_of_the_model():
    """It numbers no rows in the passes after its first one."""
    runner = runner_v2()
    adapter = compat.runner_adapter(runner)
    assert adapter.draft_request_ids(metadata()) == []
    adapter.rows(metadata(np.array([1, 0])))
    assert adapter.draft_request_ids(metadata()) == ["b", "a"]
    assert adapter.draft_request_ids(metadata(np.array([0, 1]))) == ["a", "b"]
    assert adapter.draft_request_ids(metadata()) == ["a", "b"]
    runner.kv_connector._disabled = True
    assert adapter.draft_request_ids(metadata()) == [], "a dummy batch"


def test_steps_that_layers_must_tell_of_are_not_replayed():
    """Whichever way a runner selects its graph; dummy steps are exempt."""
    calls: list[list[tuple[str, int]]] = []

    def unfit(rows) -> bool:
        calls.append([(row.request_id, row.after_tokens) for row in rows])
        return len(calls) % 2 == 1

    v1 = runner_v1()
    v1.input_batch.num_computed_tokens_cpu = [5, 8, 9]
    dispatched: list[dict] = []
    v1.cudagraph_dispatcher = SimpleNamespace(
        dispatch=lambda **arguments: dispatched.append(arguments)
    )
    adapter = compat.runner_adapter(v1)
    adapter.forbid_full_graphs(lambda rows: 1 / 0)
    adapter.forbid_full_graphs(unfit)  # vLLM builds twice when it measures graphs
    dispatch = v1.cudagraph_dispatcher.dispatch
    dispatch(num_tokens=4, uniform_decode=False)
    v1._dummy_run(lambda: dispatch(num_tokens=2, uniform_decode=True))
    assert calls == []
    dispatch(num_tokens=2, uniform_decode=True, invalid_modes={CUDAGraphMode.NONE})
    dispatch(num_tokens=2, uniform_decode=True)
    assert calls == [[("b", 6), ("a", 9)]] * 2
    adapter.draft_tokens = {"a": 3}
    dispatch(num_tokens=8, uniform_decode=True)
    assert calls[2:] == [[("b", 6), ("a", 12)]], "drafts count"
    refused = [sorted(map(str, d.get("invalid_modes", ()))) for d in dispatched]
    assert refused == [[], [], ["FULL", "NONE"], [], ["FULL"]]

    v2 = runner_v2()
    v2.req_states.num_computed_tokens_np = np.array([8, 5, 0])
    batch = SimpleNamespace(req_ids=["b", "a"], idx_mapping_np=np.array([1, 0]))
    v2.gather_batch_req_state = lambda made, each: (made, each)
    adapter = compat.runner_adapter(v2)
    adapter.forbid_full_graphs(unfit)
    gather, calls[:] = v2.gather_batch_req_state, []
    assert gather(None, 1) == (None, 1)
    assert gather(batch, None) == (batch, None)
    assert calls == []
    assert [gather(batch, 1)[1] for _ in range(2)] == [None, 1]
    assert calls == [[("b", 6), ("a", 9)]] * 2
    adapter.draft_tokens = {"a": 3}
    gather(batch, 4)
    assert calls[2:] == [[("b", 6), ("a", 12)]], "drafts count"


def test_a_runner_without_what_we_read_is_refused():
    with pytest.raises(KVPolicyError, match="no longer has kv_connector"):
        compat.runner_adapter(SimpleNamespace(req_states=None))
    with pytest.raises(KVPolicyError, match="no longer has input_batch"):
        compat.runner_adapter(SimpleNamespace())


def test_the_platform_is_known_without_a_network(monkeypatch):
    pytest.importorskip("vllm")
    from huggingface_hub import constants

    from vllm_kvplugins.vllm_adapter.config import validation

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    name, problems = validation.platform_in_use()
    assert name
    assert (name == "cpu") == (not problems)
