"""Clusterings of chats in session_dir: when the front end reads and writes them."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_chat_episodes import SMALL, Words, chat
from test_chat_episodes import encoded as encoded  # a fixture
from test_turns import plain, rendered, renderer
from waiting import wait_for

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.entrypoints.common.offline import OfflineInferenceMixin
from vllm.renderers.online_renderer import OnlineRenderer

from vllm_kvplugins.episodes.settings import EpisodeSettings
from vllm_kvplugins.sessions import clusterings
from vllm_kvplugins.sessions.clustering_records import tokens_digests
from vllm_kvplugins.sessions.clusterings import ClusteringFiles
from vllm_kvplugins.sessions.storage import DirectoryStorage
from vllm_kvplugins.vllm_adapter.config import clustering_config
from vllm_kvplugins.vllm_adapter.frontend import chat_episodes, session_choice

WITH = SamplingParams()
WITHOUT = SamplingParams(extra_args={"kv_session": False})


def server(folder: Path | None, **settings: Any) -> Any:
    """The renderer of a server that keeps sessions."""
    if folder is not None:
        settings["session_dir"] = str(folder)
    wrapped = renderer(plain, "epicache", **SMALL, **{"sessions": True} | settings)
    wrapped.config.model_config = SimpleNamespace(model="org/model")
    wrapped.get_tokenizer = lambda: Words()
    return wrapped


def asked(
    wrapped: Any, turns: int, params: Any = WITH, salt: str | None = None
) -> dict[str, Any]:
    """Render a chat, and do what follows when its request is admitted."""
    process = wrapped.process_for_engine
    if salt is not None:
        wrapped.process_for_engine = lambda *a, **k: (
            process(*a, **k) | {"cache_salt": salt}
        )
    prompt = rendered(wrapped, chat(turns, "what of trains"), False)
    wrapped.process_for_engine = process
    chat_episodes.save_clustering(prompt, params)
    files = chat_episodes._frontends[wrapped].clusterings
    if files is not None:
        wait_for(lambda: not files._num_waiting)
    return prompt


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*"))


def patched_of(prompt: Any) -> list[list[int]]:
    """Patched prompts of all episodes; that of the question comes first."""
    others = [each["patched_prompt"] for each in prompt["kv_policy_other_episodes"]]
    return [prompt["kv_policy_parameters"]["patched_prompt"], *sorted(others)]


def test_a_restarted_server_compresses_for_the_same_patched_prompts(encoded, tmp_path):
    before = asked(server(tmp_path), 48)
    assert len(files_in(tmp_path)) == 1
    after = asked(server(tmp_path), 60)
    assert patched_of(after) == patched_of(before)
    alone = asked(server(None), 60)
    assert patched_of(alone) != patched_of(before)
    assert "kv_policy_clustering_job" not in alone


def test_a_request_without_a_session_leaves_no_file(encoded, tmp_path):
    wrapped = server(tmp_path)
    asked(wrapped, 48, WITHOUT)
    assert files_in(tmp_path) == []
    asked(wrapped, 48, WITH)
    assert len(files_in(tmp_path)) == 1, "another request of the conversation saves it"


def test_a_request_without_a_session_reads_no_file(encoded, tmp_path, monkeypatch):
    before = asked(server(tmp_path), 48)
    folders = []
    original = DirectoryStorage.list
    monkeypatch.setattr(
        DirectoryStorage,
        "list",
        lambda self, prefix="": folders.append(prefix) or original(self, prefix),
    )
    with session_choice._reading(False):
        alone = asked(server(tmp_path), 60, WITHOUT)
    assert folders == []
    assert patched_of(alone) != patched_of(before)
    asked(server(tmp_path), 60)
    assert folders


def test_the_choice_is_known_while_a_chat_is_rendered(monkeypatch):
    seen: list[bool] = []

    async def preprocess_chat(self: Any, request: Any, messages: Any) -> None:
        await asyncio.sleep(0)
        seen.append(await asyncio.to_thread(session_choice.may_read))

    def _add_chat_requests(self: Any, messages: Any, params: Any) -> None:
        seen.append(session_choice.may_read())

    monkeypatch.setattr(OnlineRenderer, "preprocess_chat", preprocess_chat)
    monkeypatch.setattr(OfflineInferenceMixin, "_add_chat_requests", _add_chat_requests)
    monkeypatch.setattr(OnlineRenderer, session_choice._INSTALLED, False, raising=False)
    session_choice.install()
    requests = [
        SimpleNamespace(vllm_xargs=xargs)
        for xargs in (None, {}, {"kv_session": False}, {"kv_session": 0}, {"x": 1})
    ]

    async def together() -> None:
        await asyncio.gather(
            *(OnlineRenderer.preprocess_chat(None, each, []) for each in requests)
        )

    asyncio.run(together())
    assert sorted(seen) == [False, False, True, True, True]
    seen.clear()
    for params in (WITH, WITHOUT, [WITH, WITH], [WITH, WITHOUT], None):
        OfflineInferenceMixin._add_chat_requests(None, [], params)
    assert seen == [True, False, True, False, True]
    assert session_choice.may_read()


def test_salts_do_not_share_and_no_name_tells_the_text(encoded, tmp_path):
    for salt in ("ann", "bob", None):
        asked(server(tmp_path), 48, salt=salt)
    names = [path.name for path in files_in(tmp_path)]
    assert len(names) == 3
    parts = [name.split("-") for name in names]
    for place in (0, 2):  # digests of a beginning and of all
        assert len({each[place] for each in parts}) == 3


def test_a_file_names_the_tokens_of_its_history(encoded, tmp_path):
    prompt = asked(server(tmp_path), 48)
    (path,) = files_in(tmp_path)
    about, _ = DirectoryStorage(tmp_path, path.parent).read(path.name)
    (end,) = prompt["kv_policy_parameters"]["turn_ends"]
    ids = np.array(prompt["prompt_token_ids"], np.int32)
    assert int(about["tokens"]) == end
    assert about["tokens_digest"] == tokens_digests(ids, [end])[end]


def test_old_files_are_deleted_from_the_first_chat_on(encoded, tmp_path):
    asked(server(tmp_path), 48)
    assert len(files_in(tmp_path)) == 1
    wrapped = server(tmp_path, session_max_age_s=0.5)
    rendered(wrapped, chat(0, "warmup"), False)
    wait_for(lambda: files_in(tmp_path) == [], 20)


def test_dropped_clusterings_are_written_again_while_a_conversation_goes_on(
    encoded, tmp_path, monkeypatch
):
    monkeypatch.setattr(clusterings, "_TOUCH_S", 0)
    wrapped = server(tmp_path)
    before = asked(wrapped, 48)
    assert len(files_in(tmp_path)) == 1
    settings = chat_episodes._frontends[wrapped].router._settings
    clustering_config.delete_clusterings(wrapped.config, settings)
    wait_for(lambda: files_in(tmp_path) == [])
    asked(wrapped, 52)
    assert patched_of(asked(server(tmp_path), 60)) == patched_of(before)
    url = f"file://{tmp_path / 'url'}"
    shared = server(None, session_url=url)
    asked(shared, 48)
    cleared = []
    monkeypatch.setattr(ClusteringFiles, "clear", lambda self: cleared.append(self))
    clustering_config.delete_clusterings(shared.config, settings)
    assert cleared == [], "others use it"
    clustering_config.delete_clusterings(wrapped.config, settings)
    assert len(cleared) == 1


# -- what a folder is named after -----------------------------------------------------


def opened(tmp_path: Path, **changes: Any) -> Any:
    """The files of an engine with these settings of sessions and episodes."""
    session = {k: changes.pop(k) for k in list(changes) if k.startswith("session")}
    model = changes.pop("model", "org/model")
    config = server(tmp_path, **session).config
    config.model_config.model = str(model)
    return clustering_config.clustering_files(config, EpisodeSettings(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"encoder": "another/model"},
        {"episodes": "auto"},
        {"episodes": 5},
        {"segment_utterances": 2},
        {"guide_utterances": 4},
        {"recluster_growth": 0.25},
        {"seed": 1},
        {"model": "org/another"},
    ],
    ids=str,
)
def test_what_a_clustering_depends_on_changes_its_folder(tmp_path, changes):
    usual = opened(tmp_path).storage.folder
    assert opened(tmp_path).storage.folder == usual
    assert opened(tmp_path, build="never").storage.folder == usual
    assert opened(tmp_path, **changes).storage.folder != usual
    ids = [opened(tmp_path, encoder=f"org/{name}").storage.folder for name in "ab"]
    assert ids[0] != ids[1], "nothing is known of their weights"


def test_weights_of_an_encoder_change_its_folder_and_its_place_does_not(tmp_path):
    def folder(name: str, weights: bytes) -> Path:
        encoder = tmp_path / name / "encoder"
        (encoder / "0_Transformer").mkdir(parents=True)
        (encoder / "0_Transformer" / "model.safetensors").write_bytes(weights)
        return encoder

    encoders = [
        folder("a", b"w" * 999),
        folder("b", b"w" * 999),
        folder("c", b"v" * 999),
    ]
    digests = [clustering_config._digest_of_encoder(str(each)) for each in encoders]
    assert digests[0] == digests[1] != digests[2]
    assert clustering_config._digest_of_encoder("org/name") == ""


def test_limits_come_from_the_settings_of_sessions(tmp_path):
    assert opened(tmp_path)._limit_bytes == 64 << 20
    assert opened(tmp_path, session_disk=None)._limit_bytes == 64 << 20
    assert opened(tmp_path, session_disk="16MiB")._limit_bytes == 1 << 20
    config = server(None, session_url=f"file://{tmp_path}").config
    shared = clustering_config.clustering_files(config, EpisodeSettings())
    assert shared is not None
    assert shared._limit_bytes is None
    assert shared.storage.is_shared
    for without in (server(None), server(tmp_path, sessions=False)):
        no_files = without.config
        if no_files.additional_config["kv_policy"]["sessions"] is False:
            del no_files.additional_config["kv_policy"]["session_dir"]
        found = clustering_config.clustering_files(no_files, EpisodeSettings())
        assert found is None


def test_a_look_up_of_nothing_takes_little_time(encoded, tmp_path):
    """A store that answers does not delay a new conversation by its patience."""
    wrapped = server(tmp_path)
    asked(wrapped, 48)
    files = chat_episodes._frontends[wrapped].clusterings
    started = time.monotonic()
    assert files.find([bytes([n]) * 32 for n in range(200)], 134) is None
    assert time.monotonic() - started < 0.9
