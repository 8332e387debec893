"""Names that a policy class must not use: hooks of earlier versions, among others."""

from __future__ import annotations

from collections.abc import Collection

from vllm_kvplugins.errors import coded, refuse

# old hook -> what replaces it
REMOVED_HOOKS: dict[str, str] = {
    "retention": "the property `retrieval` or `spans`, which the base classes "
    "Retriever and SpanPolicy define",
    "observes": "Observation.triggers, of the property `observation`; for probes, the "
    "property `probing`",
    "observes_steps": "the property `observation`",
    "observe": "Observation.observe or Probing.observe, of the properties "
    "`observation` and `probing`",
    "pack_observed": "Observation.pack, of the property `observation`",
    "unpack_observed": "Observation.unpack, of the property `observation`",
    "needs_tokenizer": "Probing.needs_tokenizer, of the property `probing`",
    "asks_patched_prompt": "Probing.uses_patched_prompt, of the property `probing`",
    "probe_room": "Probing.room, of the property `probing`",
    "probes": "Probing.probes, of the property `probing`",
    "least_new_tokens": "Probing.min_new_tokens, of the property `probing`, or "
    "`queries_needed`",
    "needs_turns": "the property `turns`",
    "finds_turns": "Turns.finds_in_prompt, of the property `turns`",
    "turn_ends": "Turns.turn_ends, of the property `turns`",
    "wants_history": "Turns.history_only, of the property `turns`",
    "episode_settings": "EpisodeRouting.settings, of the property `episode_routing`",
    "patched_prompt_tokens": "EpisodeRouting.patched_prompt_tokens, of the property "
    "`episode_routing`",
    "needs_surprisal": "the base class SpanPolicy",
    "compacts_late": "the base class SpanPolicy",
    "knows_query_heads": "SpanPolicy.uses_query_heads",
    "most_rank": "SpanPolicy.max_rank",
    "least_gate": "SpanPolicy.min_gate",
    "prompt_blocks": "max_prompt_blocks",
}


# Settings of the engine in ``--kv-policy-config``. ``config.parse_policy`` removes them
# before the policy sees its own settings.
RESERVED_SETTINGS = frozenset(
    {
        "name",
        "kernel",
        "sessions",
        "session_memory",
        "session_max_age_s",
        "session_keep_on_device",
        "session_park",
        "session_dtype",
        "session_dir",
        "session_disk",
        "session_url",
        "session_refresh_s",
        "session_lookup_s",
        "session_load_s",
        "session_index_memory",
        "shared_prefix",
        "shared_prefix_limit",
    }
)


def refuse_hook_names(
    cls: type, hooks: Collection[str], fields: Collection[str]
) -> None:
    """Refuse a policy class whose names clash with the contract, now or earlier.

    Without this check the engine would silently ignore a hook under its old name.

    Args:
        cls: the class; only what it defines itself is checked.
        hooks: names of the contract's hooks.
        fields: names of the class's settings.

    Raises:
        KVPolicyError: KVP106, with the new name of each old hook; KVP107 for settings
            that are named like a hook or like a setting of the engine.
    """
    reasons = [
        coded(
            "KVP106",
            f"`{name}` is a hook of an earlier version; it became {new}. Rename it "
            "(docs/adding-a-policy.md).",
        )
        for name, new in REMOVED_HOOKS.items()
        if name in vars(cls)
    ]
    reasons += [
        coded("KVP107", f"setting `{name}` is named like a hook; rename the setting.")
        for name in fields
        if name in hooks
    ]
    reasons += [
        coded(
            "KVP107",
            f"setting `{name}` is named like a setting of the engine, which would take "
            "its value; rename the setting.",
        )
        for name in fields
        if name in RESERVED_SETTINGS
    ]
    refuse(f"policy class {cls.__name__!r} does not fit the contract", reasons)
