"""Sessions of real policies at two tensor-parallel sizes.

The fake engine has two KV heads. A rank of two runs the same requests with one of them.
What it saves must be what an engine of one rank saves of this head, bit for bit; that
holds for policies with ``scores_heads_separately`` and a uniform allocator.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import fake_engine
import numpy as np
import pytest
import torch
from fake_engine import GROUP, HEAD_DIM, KV_HEADS, Request
from fake_sessions import SessionEngine
from test_flowkv import flow
from test_head_shards import SIZES, TOKENS, Dense, check_equal
from test_session_files import Caches
from test_sessions_runtime import BLOCK, run, says, small
from token_pool import CopiedCache
from typer.testing import CliRunner

from vllm_kvplugins.cli.app import app
from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.policies.registry import available_policies, get_policy_class
from vllm_kvplugins.sessions.commands import Save, Session, SessionCommands
from vllm_kvplugins.sessions.directory import SessionDirectory
from vllm_kvplugins.sessions.files import Identity, SessionFolder
from vllm_kvplugins.sessions.head_shards import Heads, Shard, gather
from vllm_kvplugins.sessions.settings import SessionDtype
from vllm_kvplugins.sessions.snapshot import CacheSnapshot
from vllm_kvplugins.sessions.storage import DirectoryStorage
from vllm_kvplugins.sessions.store import SessionStore
from vllm_kvplugins.sessions.tensor_file import SessionFileError

SEPARATE = [
    name
    for name in available_policies()
    if get_policy_class(name)().scores_heads_separately
]
# Compressors whose heads decide together, or whose scores depend on a head's number.
TOGETHER = ["chunkkv", "tova", "random"]
HEADS = Heads((4,))
IDENTITY = Identity.of(model="m")
QUANTIZED: list[SessionDtype] = ["int8", "int4"]


@pytest.fixture(autouse=True)
def _as_in_an_engine() -> Iterator[None]:
    """vLLM runs steps in inference mode, and tensors created there stay inference
    tensors.
    """
    with torch.inference_mode():
        yield


def uniform(name: str) -> dict[str, Any]:
    """Settings of a policy whose heads keep equally many pages."""
    if name == "flowkv":
        return flow("snapkv", ratio=0.4)
    if name == "epicache":
        base = {"sinks": 2, "recent": 3}
        sizes = {"budget": 16, "prefill_block": 12, "longest_patched_prompt": 16}
        return {"name": name, "base_config": base, "allocator": "uniform"} | sizes
    fields = get_policy_class(name).model_fields
    more = {"allocator": "uniform", "lag": 4, "chunk_length": 4}
    return dict(small(name)) | {k: v for k, v in more.items() if k in fields}


@contextmanager
def rank_of_two(rank: int) -> Iterator[None]:
    """Engines in this context have one of the two KV heads."""
    make, probe = Request.make, SessionEngine._run_probe
    weights = fake_engine.output_weights()
    group = slice(rank * GROUP, (rank + 1) * GROUP)

    def only_own(name: str, prompt: int, answer: int) -> Request:
        with mock.patch.object(fake_engine, "KV_HEADS", KV_HEADS):
            request = make(name, prompt, answer)
        for part in ("keys", "values", "visible"):
            setattr(request, part, getattr(request, part)[:, rank : rank + 1].clone())
        request.queries = request.queries[:, :, group].clone()
        return request

    def run_probe(
        self: SessionEngine, token_ids: torch.Tensor, positions: torch.Tensor
    ) -> None:
        prober = self.runtime.prober
        attend = prober.attend

        def with_own(layer: int, *heads: torch.Tensor) -> torch.Tensor:
            queries, keys, values = heads
            own = slice(rank, rank + 1)
            return attend(layer, queries[:, group], keys[:, own], values[:, own])

        with (
            mock.patch.object(fake_engine, "KV_HEADS", KV_HEADS),
            mock.patch.object(type(prober), "attend", lambda _, *args: with_own(*args)),
        ):
            probe(self, token_ids, positions)

    with (
        mock.patch.object(fake_engine, "KV_HEADS", 1),
        mock.patch.object(fake_engine, "output_weights", return_value=weights[group]),
        mock.patch.object(Request, "make", staticmethod(only_own)),
        mock.patch.object(SessionEngine, "_run_probe", run_probe),
    ):
        yield


def talked(policy: Any, **engine: Any) -> tuple[SessionEngine, Request, CacheSnapshot]:
    """An engine, a request that has ended there, and what it saved."""
    each = SessionEngine(policy, BLOCK, 90, sessions=True, **engine)
    request = says(each.add("r", 60, 25, (30,)))
    run(each, request, 9)
    saved = each.save("r")
    each.remove("r")
    return each, request, saved


def saved_by_two(policy: Any, **engine: Any) -> list[CacheSnapshot]:
    saved = []
    for rank in range(2):
        with rank_of_two(rank):
            saved.append(talked(policy, **engine)[2])
    return saved


def joined(saved: list[CacheSnapshot], drafts: bool = False) -> CacheSnapshot:
    heads = Heads((KV_HEADS, 2 * KV_HEADS) if drafts else (KV_HEADS,))
    return gather(heads, Shard(0, 1), 2, saved.__getitem__)


@pytest.mark.parametrize("name", SEPARATE)
def test_two_ranks_save_what_one_saves(name: str):
    """And the other way round. The request that continues it attends to what the cache
    of all its tokens has at the kept positions."""
    policy = uniform(name)
    assert parse_policy(policy).page_allocator().uniform
    engine, request, saved = talked(policy)
    assert name == "full" or saved.compaction is not None
    of_two = saved_by_two(policy)
    check_equal(joined(of_two), saved)
    for rank, expected in enumerate(of_two):
        cut = gather(Heads((KV_HEADS,)), Shard(rank, 2), 1, lambda _: saved)
        check_equal(cut, expected)
    again = engine.resume(request, joined(of_two), 110, 10, (30, 85))
    # EpiCache compresses more of the history first.
    assert 0 < again.computed <= saved.tokens
    assert name == "epicache" or again.computed == saved.tokens
    run(engine, again, 9)


@pytest.mark.parametrize("name", ["snapkv", "flowkv"])
def test_draft_layers_are_cut_and_joined_too(name: str):
    policy = uniform(name)
    _, _, saved = talked(policy, drafts=True)
    of_two = saved_by_two(policy, drafts=True)
    assert len(saved.parts) == 2
    check_equal(joined(of_two, drafts=True), saved)
    heads = Heads((KV_HEADS, 2 * KV_HEADS))
    for rank, expected in enumerate(of_two):
        check_equal(gather(heads, Shard(rank, 2), 1, lambda _: saved), expected)


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_quantized_sessions_are_cut_and_joined_too(dtype: SessionDtype):
    policy = uniform("snapkv")
    _, _, saved = talked(policy, session_dtype=dtype)
    assert saved.queries is not None
    assert saved.queries.shape[-1] != HEAD_DIM
    check_equal(joined(saved_by_two(policy, session_dtype=dtype)), saved)


@pytest.mark.parametrize("name", TOGETHER)
def test_heads_that_decide_together_keep_other_tokens(name: str):
    """So their sessions are not offered to other sizes."""
    assert not get_policy_class(name)().scores_heads_separately
    policy = uniform(name)
    saved, other = talked(policy)[2], joined(saved_by_two(policy))
    assert not torch.equal(saved.parts[0].positions, other.parts[0].positions)


@pytest.mark.parametrize("allocator", ["head-adaptive", "cross-layer"])
def test_heads_that_share_pages_are_refused(allocator: str):
    policy = uniform("knorm") | {"allocator": allocator}
    assert not parse_policy(policy).page_allocator().uniform
    with pytest.raises(ValueError, match="different numbers of pages"):
        gather(Heads((KV_HEADS,)), Shard(0, 2), 1, lambda _: talked(policy)[2])


@pytest.mark.parametrize("name", ["streaming-llm", "knorm", "full"])
def test_copies_of_a_head_keep_the_same_tokens(name: str):
    """Without queries, two ranks with the same head save the same."""
    policy = uniform(name)
    saved = []
    for _ in range(2):
        with rank_of_two(1):
            saved.append(talked(policy)[2])
    check_equal(*saved)
    heads = Heads((1,), replicas_are_equal=True)
    check_equal(gather(heads, Shard(0, 1), 2, saved.__getitem__), saved[0])


# -- which engines read other sizes ---------------------------------------------------


def heads_of(policy: dict[str, Any], drafter: Any = None) -> Heads | None:
    """What an engine divides: of a model with 8 KV heads, by vLLM's configuration."""
    pytest.importorskip("vllm", reason="a part of the adapter")
    from vllm_kvplugins.vllm_adapter.scheduler import session_config

    speculative = None
    if drafter is not None:
        draft = SimpleNamespace(get_total_num_kv_heads=lambda: drafter)
        speculative = SimpleNamespace(method="draft_model", draft_model_config=draft)
    model = SimpleNamespace(get_total_num_kv_heads=lambda: 8)
    config = SimpleNamespace(model_config=model, speculative_config=speculative)
    return session_config._heads(config, parse_policy(policy))


def test_engines_whose_heads_decide_alone_read_other_sizes():
    assert heads_of({"name": "flowkv"}) == Heads((8,))
    assert heads_of({"name": "flowkv"}, drafter=4) == Heads((8, 4))
    by_keys = Heads((8,), replicas_are_equal=True)
    assert heads_of({"name": "streaming-llm"}) == by_keys
    assert heads_of({"name": "full"}) == by_keys
    for name in ("h2o", "infinipot", "snapkv"):
        assert heads_of({"name": name}) == Heads((8,)), "replicas see some queries"


@pytest.mark.parametrize(
    "policy",
    [
        {"name": "pyramidkv"},
        {"name": "epicache"},
        {"name": "kvzip"},
        {"name": "snapkv", "allocator": "head-adaptive"},
        {"name": "flowkv", "base": "chunkkv"},
        {"name": "tova"},
        {"name": "random"},
    ],
    ids=str,
)
def test_engines_whose_heads_share_a_budget_or_scores_do_not(policy: dict[str, Any]):
    assert heads_of(policy) is None


def test_a_worker_has_the_files_of_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """vLLM sets the rank in the constructor of its worker."""
    pytest.importorskip("vllm", reason="a part of the adapter")
    from vllm_kvplugins.vllm_adapter.scheduler import session_config
    from vllm_kvplugins.vllm_adapter.worker.context import WorkerContext
    from vllm_kvplugins.vllm_adapter.worker.worker import PolicyWorker

    class VllmWorker:
        def __init__(self, vllm_config: Any, local_rank: int, rank: int) -> None:
            vllm_config.parallel_config.rank = rank

    class Worker(PolicyWorker, VllmWorker):
        """As the adapter makes one."""

    files = SessionFolder(tmp_path, IDENTITY, 2)
    files.prepare()
    monkeypatch.setattr(session_config, "session_files", lambda config: files)
    monkeypatch.setattr(
        WorkerContext, "create", lambda config: WorkerContext(SimpleNamespace())
    )
    request = {"name": "flowkv", "sessions": True, "session_dir": str(tmp_path)}
    for rank in range(2):
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(rank=0),
            kv_transfer_config=None,
            additional_config={"kv_policy": request},
        )
        store = Worker(config, 0, rank=rank).kv_policy.session_store
        store._transfer = Loads()
        saved = Dense((2,)).part(rank, 2)
        copied = CopiedCache(saved)
        monkeypatch.setattr(Loads, "save", lambda *_, copied=copied: copied)
        tokens = np.arange(TOKENS, dtype=np.int32)
        one = Session("s", "o", tokens, saved.compaction, 1000, TOKENS - 5)
        store.save(SessionCommands(saves=[Save(one, "r", (), writes=True)]))
        store.close()
    assert set(contents(files)) == {"s.r0of2.safetensors", "s.r1of2.safetensors"}


# -- files and workers ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["h2o", "expected-attention"])
def test_a_session_goes_through_the_files_of_two_ranks(tmp_path: Path, name: str):
    policy = uniform(name)
    engine, request, saved = talked(policy)
    heads = Heads((KV_HEADS,))
    two = SessionFolder(tmp_path, IDENTITY, 2, heads)
    two.prepare()
    tokens = torch.arange(saved.tokens).int().numpy()
    form = tokens, saved.compaction, saved.num_bytes, saved.first_query
    for rank, part in enumerate(saved_by_two(policy)):
        two.write(Session("s", "o", *form), rank, part)
    one = SessionFolder(tmp_path, IDENTITY, 1, heads)
    (found,) = one.scan().sessions
    read = one.read("s", 0, found.session.file_ranks)
    check_equal(read, saved)
    assert engine.transfer.mismatch(read) is None
    run(engine, engine.resume(request, read, 110, 10, (30, 85)), 9)


def written(tmp_path: Path, ranks: int, name: str = "s", first: int = 0) -> Dense:
    """A dense cache, whose session an engine has written."""
    dense = Dense((4,), seed=len(name))
    files = SessionFolder(tmp_path, IDENTITY, ranks, HEADS)
    files.prepare()
    tokens = np.arange(first, first + TOKENS, dtype=np.int32)
    for rank in range(ranks):
        saved = dense.part(rank, ranks)
        form = name, "o", tokens, saved.compaction, 1000, TOKENS - 5
        files.write(Session(*form), rank, saved)
    return dense


def contents(files: SessionFolder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in files.folder.iterdir()}


class Loads(Caches):
    """The transfer of one rank: notes what it loads."""

    def __init__(self) -> None:
        self.loaded: dict[str, CacheSnapshot] = {}

    def restore(self, request_id: str, prompt: int, saved: CacheSnapshot, *rest):
        self.loaded[request_id] = saved


class Engine:
    """The directory and the workers of an engine with these ranks."""

    def __init__(self, tmp_path: Path, ranks: int, heads: Heads | None = HEADS) -> None:
        self.files = SessionFolder(tmp_path, IDENTITY, ranks, heads)
        self.files.prepare()
        self.transfers = [Loads() for _ in range(ranks)]
        self.stores = [
            SessionStore(transfer, self.files, rank)
            for rank, transfer in enumerate(self.transfers)
        ]
        self.scan = self.files.scan()
        self.directory = SessionDirectory(
            10_000, ranks=ranks, writes=True, other_disk_bytes=self.scan.other_bytes
        )
        self.directory.add_files(self.scan.sessions)

    def step(self) -> None:
        commands = self.directory.take_commands()
        for store in self.stores:
            store.save(commands)
            store.execute(commands)
            while store._reads and not all(r.done() for r in store._reads.values()):
                store.wait_for_copies()
        acks = [ack for store in self.stores for ack in store.take_acks()]
        self.directory.process(acks)
        self.directory.check_integrity()

    def ask(self, first: int = 0) -> list[CacheSnapshot]:
        """What each rank restores of a session; nothing without one."""
        prompt = np.arange(first, first + TOKENS + 1, dtype=np.int32)
        match = next(self.directory.find("o", prompt), None)
        if match is not None and not match.ready:
            assert self.directory.fetch(match, "r")
            self.step()
            match = next(self.directory.find("o", prompt), None)
        self.directory.stop_waiting("r")
        if match is None:
            return []
        self.directory.load(match, "r", len(prompt), ())
        self.step()
        return [transfer.loaded.pop("r") for transfer in self.transfers]

    def close(self) -> None:
        for store in self.stores:
            store.close()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Makes engines that are closed after the test."""
    made: list[Engine] = []

    def make(*arguments: Any, **more: Any) -> Engine:
        made.append(Engine(tmp_path, *arguments, **more))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize(("written_by", "ranks"), SIZES)
def test_all_ranks_load_their_heads_from_the_files(
    tmp_path: Path, engine: Any, written_by: int, ranks: int
):
    """The files stay as they are, and they count once."""
    dense = written(tmp_path, written_by)
    each = engine(ranks)
    before = contents(each.files)
    assert len(before) == written_by
    assert each.directory.written_bytes == sum(map(len, before.values()))
    assert each.scan.other_bytes == 0
    loaded = each.ask()
    assert len(loaded) == ranks
    for rank, found in enumerate(loaded):
        check_equal(found, dense.part(rank, ranks))
    assert each.directory.counts.hits == 1
    assert contents(each.files) == before


@pytest.mark.parametrize(("written_by", "ranks"), [(4, 2), (2, 4), (1, 2), (4, 1)])
def test_all_files_of_a_session_are_deleted(
    tmp_path: Path, engine: Any, written_by: int, ranks: int
):
    """Those of another session stay."""
    written(tmp_path, written_by)
    other = written(tmp_path, written_by, "other", first=1000)
    each = engine(ranks)
    assert each.directory.num_sessions == 2
    each.directory.evict("s")
    each.step()
    each.close()
    assert {name.split(".")[0] for name in contents(each.files)} == {"other"}
    sizes = map(len, contents(each.files).values())
    assert each.directory.written_bytes == sum(sizes)
    again = engine(ranks)
    assert [each.parts[0].layout for each in again.ask(1000)] == ["l0"] * ranks
    assert other.part(0, 1).tokens == TOKENS


def damaged(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 4
    path.write_bytes(raw)


@pytest.mark.parametrize("fault", [damaged, Path.unlink])
@pytest.mark.parametrize("part", [0, 1, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_fault_in_a_part_is_a_miss(
    tmp_path: Path, engine: Any, ranks: int, part: int, fault: Any
):
    """After the session was found. Nothing is loaded, also on the rank that does not
    read this part."""
    written(tmp_path, 4)
    each = engine(ranks)
    fault(each.files.folder / f"s.r{part}of4.safetensors")
    assert each.ask() == []
    assert (each.directory.counts.failures, each.directory.num_sessions) == (1, 0)
    assert sum(store.num_held for store in each.stores) == ranks - 1
    each.step()
    assert all(store.num_held == 0 for store in each.stores)
    assert engine(ranks).ask() == []


@pytest.mark.parametrize("part", range(4))
def test_a_session_without_a_part_is_not_found(tmp_path: Path, engine: Any, part: int):
    """When the engine starts."""
    written(tmp_path, 4)
    (SessionFolder(tmp_path, IDENTITY).folder / f"s.r{part}of4.safetensors").unlink()
    each = engine(2)
    assert each.directory.num_sessions == 0
    assert each.files.list_complete() == {}
    assert len(each.scan.problems) == (part != 0)
    assert each.scan.other_bytes == sum(map(len, contents(each.files).values()))


def test_a_file_that_vanishes_during_the_read_is_a_miss(
    tmp_path: Path, engine: Any, monkeypatch: pytest.MonkeyPatch
):
    """After the parts before it were read."""
    written(tmp_path, 4)
    each, reads = engine(1), list[str]()
    whole = DirectoryStorage.read

    def late(self: DirectoryStorage, name: str, only: Any = None) -> Any:
        reads.append(name)
        if name.startswith("s.r2"):
            (self.folder / name).unlink()
        return whole(self, name, only)

    monkeypatch.setattr(DirectoryStorage, "read", late)
    assert each.ask() == []
    assert reads == [f"s.r{part}of4.safetensors" for part in range(3)]
    assert each.directory.counts.failures == 1


def test_parts_of_two_sessions_are_not_joined(tmp_path: Path, engine: Any):
    """A file under the name of another one, with a valid digest."""
    written(tmp_path, 2)
    written(tmp_path, 2, "other", first=1000)
    each = engine(1)
    other = each.files.folder / "other.r1of2.safetensors"
    other.replace(each.files.folder / "s.r1of2.safetensors")
    assert each.ask() == []
    assert each.directory.counts.failures == 1


@pytest.mark.parametrize("heads", [None, Heads((3,))])
def test_sizes_that_do_not_fit_are_not_offered(
    tmp_path: Path, engine: Any, heads: Heads | None, caplog: pytest.LogCaptureFixture
):
    """As if the files were not there, except that they count. No warning."""
    written(tmp_path, 2)
    each = engine(1, heads)
    assert each.directory.num_sessions == 0
    assert each.scan.problems == []
    assert each.files.list_complete() == {}
    assert each.scan.other_bytes == sum(map(len, contents(each.files).values())) > 0
    with pytest.raises(SessionFileError, match="not readable with 1 ranks"):
        each.files.read("s", 0, 2)
    assert engine(2, heads).directory.num_sessions == 1, "its own size"
    assert not caplog.records


def test_a_name_with_an_absurd_number_of_ranks_is_a_problem(tmp_path: Path):
    files = SessionFolder(tmp_path, IDENTITY, 1, Heads((1,), replicas_are_equal=True))
    files.prepare()
    for ranks in ("0", "00", "1" + 100 * "0"):
        (files.folder / f"s.r0of{ranks}.safetensors").write_bytes(b"no session")
    scan = files.scan()
    assert len(scan.problems) == 1
    assert scan.sessions == []
    assert files.list_complete() == {}


def test_one_session_of_two_sizes_is_found_once(tmp_path: Path, engine: Any):
    for ranks in (4, 2, 1):
        written(tmp_path, ranks)
    each = engine(2)
    assert each.directory.num_sessions == 1
    assert [p.ranks for p in each.files.list_complete().values()] == [2]
    assert len(each.ask()) == 2


def test_detached_sessions_leave_no_command(tmp_path: Path, engine: Any):
    written(tmp_path, 4)
    each = engine(1)
    prompt = np.arange(TOKENS + 1, dtype=np.int32)
    each.directory.fetch(next(each.directory.find("o", prompt)), "r")
    assert each.directory._commands.file_ranks == {"s": 4}
    each.directory.detach()
    commands = each.directory.take_commands()
    assert (commands.stage, commands.unlink, commands.file_ranks) == ([], [], {})


def test_the_command_line_sees_one_session(tmp_path: Path):
    """Whoever wrote it. Of a session with files of two sizes, the incomplete ones are
    garbage."""
    runner = CliRunner()
    dense = written(tmp_path, 4)
    written(tmp_path, 1, "other", first=1000)
    files = SessionFolder(tmp_path, IDENTITY, 2, HEADS)
    shown = runner.invoke(app, ["sessions", "show", str(tmp_path), "s", "--json"])
    assert shown.exit_code == 0
    assert len(json.loads(shown.stdout)["files"]) == 4
    assert json.loads(shown.stdout)["problems"] == []
    tokens = np.arange(TOKENS, dtype=np.int32)
    form = "s", "o", tokens, dense.compaction, 1000, TOKENS - 5
    files.write(Session(*form), 1, dense.part(1, 2))
    for path in files.folder.iterdir():
        os.utime(path, (time.time() - 9999,) * 2)
    before = set(contents(files))
    runner.invoke(app, ["sessions", "gc", str(tmp_path)])
    assert before - set(contents(files)) == {"s.r1of2.safetensors"}
    done = runner.invoke(app, ["sessions", "delete", str(tmp_path), "s"])
    assert "removed 1 sessions" in done.stdout
    assert set(contents(files)) == {"other.r0of1.safetensors"}
