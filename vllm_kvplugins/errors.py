"""Errors that a user can cause, and the stable code of each.

Every message that refuses something starts with a code, ``[KVP104] ...``. The code
stays the same when the text improves; ``docs/faq.md`` explains each one. Tests compare
codes, never texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# One line per code: what went wrong, without the value and without the remedy.
# Ranges: 001 engine and vLLM settings, 100 policies, budgets and plans, 200 worker and
# attention, 300 sessions, 400 native operations and indices, 500 requests and chats,
# 600 command line, models and training. Never reuse a number.
CODES: dict[str, str] = {
    # 001-099: engine and vLLM settings
    "KVP001": "this version of vLLM is not supported",
    "KVP002": "this vLLM lacks a function or parameter that the plugin uses",
    "KVP003": "the platform is neither a CPU nor CUDA",
    "KVP004": "this kind of speculative decoding is not supported",
    "KVP005": "this KV connector cannot run next to a policy",
    "KVP006": "vLLM's KV offloading is configured",
    "KVP007": "another scheduler class is configured",
    "KVP008": "another worker class is configured",
    "KVP009": "the plugin's worker runs without a policy",
    "KVP010": "the model does not generate text",
    "KVP011": "the model uses multi-head latent attention (MLA)",
    "KVP012": "the model has no layer with full attention",
    "KVP013": "the model has no attention layers, or layers of an unknown type",
    "KVP014": "the model is an encoder-decoder model",
    "KVP015": "the model caps attention logits, and the policy or kernel does not",
    "KVP016": "a layer uses ALiBi",
    "KVP017": "a layer has learned sinks, which the kernel does not support",
    "KVP018": "a layer shares the KV cache of another layer",
    "KVP019": "the policy cannot run with this quantized KV cache",
    "KVP020": "the block size does not fit the attention kernels",
    "KVP021": "--kv-sharing-fast-prefill is set",
    "KVP022": "pipeline or context parallelism is not supported",
    "KVP023": "microbatching is not supported",
    "KVP024": "--attention-backend is set",
    "KVP025": "the requested attention kernel cannot run here",
    "KVP026": "the policy is configured twice",
    "KVP027": "--kv-policy-config is given without --kv-policy",
    "KVP028": "--kv-policy-config is not a JSON object of settings",
    "KVP029": "kv_policy is neither a name nor a mapping with a name",
    "KVP030": "the policy does not support float16",
    "KVP031": "the policy cannot undo the model's RoPE",
    "KVP032": "the packages for episodes are not installed",
    "KVP033": "host_fetch 'direct' or index 'device' cannot work here",
    "KVP034": "the policy does not support sessions",
    "KVP035": "the policy does not support session files",
    "KVP036": "the policy has no setting of this name",
    "KVP037": "a setting has an invalid value",
    "KVP038": "the policy has no episodes",
    "KVP039": "vLLM cannot load the model (explain, record)",
    "KVP040": "the policy's probes cannot run with these engine settings",
    "KVP041": "the policy cannot read what it needs from the model",
    "KVP042": "the hybrid KV cache manager is off, and the model needs it",
    "KVP043": "vLLM splits the full-attention layers into several groups",
    "KVP044": "sessions are not supported with windowed or recurrent layers",
    "KVP045": "the model attends to images in both directions",
    "KVP046": "keys and values of a layer have different sizes",
    "KVP047": "--prefix-match-unit is smaller than a block",
    "KVP048": "--async-scheduling is set together with speculative decoding",
    "KVP049": "the policy or the model cannot run next to another KV connector",
    "KVP050": "shared_prefix is set, but the policy or the engine shares no prefixes",
    "KVP051": "auto does not take a setting of a policy",
    "KVP052": "auto stands for a policy where one must be named",
    "KVP053": "auto found no policy, and stock vLLM does not fit either",
    "KVP054": "auto cannot estimate the KV cache of this engine",
    "KVP055": "auto would choose on each node of an engine on several nodes",
    # 100-199: policies, budgets and plans
    "KVP100": "no policy has this name",
    "KVP101": "the import path of a policy is not 'module:Class'",
    "KVP102": "another policy has this name already",
    "KVP103": "the policy's module cannot be imported, or has no such class",
    "KVP104": "the class is not a policy",
    "KVP105": "the policy's `name` differs from the name under which it is listed",
    "KVP106": "the policy class defines a hook of an earlier version of the contract",
    "KVP107": "a setting of the policy class has the name of a hook or engine setting",
    "KVP108": "the policy has no `score`, so it cannot choose tokens",
    "KVP111": "the base of a wrapper policy (flowkv, epicache) is not a compressor",
    "KVP112": "base_config contains a setting that the wrapper policy sets itself",
    "KVP113": "base_config is not valid for the base policy",
    "KVP114": "a profile of layers or heads cannot be read or is not valid",
    "KVP115": "a file with page weights cannot be read or is not valid",
    "KVP116": "a setting or a file of the policy does not fit the model",
    "KVP117": "a cached sensitivity profile is damaged or belongs to another model; "
    "logged",
    "KVP118": "the layers of the model are not measured in the background; logged",
    "KVP119": "the environment variable KVP_CALIBRATE has an unknown value",
    "KVP129": "check-policy: scores of a KV head depend on other heads",
    "KVP130": "check-policy: the policy does not drop tokens by a score",
    "KVP131": "check-policy: the policy runs probes, which need a model",
    "KVP132": "check-policy: `score` or `observe` raised an exception",
    "KVP133": "check-policy: `score` changed tensors of the cache",
    "KVP134": "check-policy: `score` returned NaN for a slot that holds a token",
    "KVP135": "check-policy: `score` is not deterministic",
    "KVP136": "check-policy: scores depend on slots that hold no token",
    "KVP137": "check-policy: infinite scores do not leave the budget a choice",
    "KVP138": "check-policy: a session cannot store what `observe` returned",
    "KVP139": "check-policy: all scores are equal",
    "KVP140": 'icecache: `fetch: "pages"` with a setting that its pages do not allow',
    "KVP141": "host_dtype 'int8' or 'int4' with host_fetch 'direct'",
    "KVP142": 'icecache: `index: "device"` without host_memory',
    "KVP143": 'icecache: `index: "device"` with a setting of a search on the host',
    "KVP144": "mean_tokens with a setting that it does not work with",
    "KVP145": "codes and means of host_memory do not fit on the device",
    # 200-299: worker and attention
    "KVP201": "a policy's `score` did not return one float per slot",
    "KVP202": "the KV caches of the layers are not one allocation",
    "KVP203": "the loaded layers differ from the model's configuration",
    "KVP204": "vLLM changed the block size of full attention",
    # 300-399: sessions
    "KVP301": "sessions is false, but a setting that needs sessions is set",
    "KVP302": "session_disk is set without session_dir, or a setting of session_url "
    "without it",
    "KVP303": "a session setting is given under its old and its new name",
    "KVP304": "session_dir cannot be created or written to",
    "KVP305": "a session could not be saved and is not kept; logged",
    "KVP306": "a session file could not be written; it stays in memory; logged",
    "KVP307": "a session could not be loaded; its request recomputes; logged",
    "KVP308": "a session is larger than session_memory and is not kept; logged",
    "KVP309": "a session file was skipped; logged",
    "KVP310": "session files are written too slowly, so sessions are not kept; logged "
    "once",
    "KVP311": "session_disk is too small for a session file; logged once",
    "KVP312": "session_dtype 'int8' or 'int4' with an fp8 KV cache",
    "KVP313": "session_dir and session_url are both set",
    "KVP314": "session_url is not a valid URL, or needs packages that are missing",
    "KVP315": "session_url cannot be written to at start-up",
    "KVP316": "session_url failed or was late; logged",
    "KVP317": "the caches were reset, so the engine no longer uses session_url; logged",
    "KVP318": "session_url with neither listings nor look-ups",
    "KVP319": "a clustering of episodes could not be saved, looked up or deleted; "
    "logged",
    # 400-499: native operations and indices
    "KVP400": "the environment variable KVP_OPS has an unknown value",
    "KVP401": "KVP_OPS=compiled, but the compiled operations cannot run",
    "KVP402": "the environment variable KVP_SIMD has an unknown value",
    "KVP403": "a feature needs the compiled extension, which is not in use",
    # 500-599: requests and chats
    "KVP500": "streaming input is not supported",
    "KVP501": "the request can need more host memory than the policy has",
    "KVP502": "the request can need more blocks than the pool has",
    "KVP503": "the policy needs token IDs, not embeddings",
    "KVP504": "turn_ends is invalid",
    "KVP505": "patched_prompt is invalid or not used by this policy",
    "KVP506": "the encoder for episodes cannot be loaded",
    "KVP507": "the encoder for episodes returned unusable vectors",
    "KVP508": "a file with a history is unusable",
    "KVP509": "the prompt is empty or does not fit (explain, record)",
    "KVP510": "no step fetched anything (record)",
    "KVP511": "kv_transfer_params is not an object",
    "KVP512": "kv_session is not true or false, or the server keeps no sessions",
    "KVP513": "shared_prefix of a request is not a number of tokens, or the server "
    "shares no prefixes",
    "KVP514": "loop_ends is invalid, or comes without turn_ends",
    "KVP515": "kv_report is not true or false",
    "KVP516": "ttl is no number of seconds, or the server keeps no sessions",
    # 600-699: command line, models and training
    "KVP600": "a Python package that the command needs is not installed",
    "KVP601": (
        "an input file cannot be read, is not UTF-8 text, is empty, or holds no chat "
        "messages"
    ),
    "KVP602": "a result cannot be written",
    "KVP603": "an option of the command has an invalid value",
    "KVP604": "`kvplugins research record`: the policy fetches nothing",
    "KVP605": "`kvplugins sessions`: the place or a session does not exist, or an ID "
    "is not unique",
    "KVP606": "`kvplugins research plot`: too little or too much data for one plot",
    "KVP607": "`kvplugins research plot`: the file has another format or version, or "
    "is incomplete",
    "KVP608": "`kvplugins sessions`: the store fails, or a file cannot be deleted",
    "KVP609": "`kvplugins chat`: the page cannot be served at this address",
    "KVP610": "`kvplugins chat`: the vLLM server does not respond",
    "KVP620": "the default model cannot be downloaded",
    "KVP621": "the downloaded file is not the expected default model",
    "KVP622": "the converted default model fails a check",
    "KVP623": "the packages that convert the default model cannot be installed",
    "KVP624": "the target folder of the default model contains other files",
    "KVP625": "transformers cannot load the model or its tokenizer",
    "KVP626": "calibration or training cannot replace the attention of this model",
    "KVP627": "the model computes NaN or infinity",
    "KVP628": "the `config.json` of the model cannot be found or read",
    "KVP629": "`config.json` does not describe a cache of equal layers",
    "KVP640": "`kvplugins research calibrate` or `rank-heads`: a document is too short",
    "KVP641": "`kvplugins research calibrate` or `rank-heads`: two documents have the "
    "same file name",
    "KVP642": "`kvplugins research train-router`: the texts are too few or too short",
    "KVP643": "`kvplugins research train-router`: a setting does not fit the model",
    "KVP644": "`kvplugins research train-router`: the checkpoint is damaged or belongs "
    "to another run",
    "KVP645": "`kvplugins research train-router`: the loss is not finite",
    "KVP646": "the router file is missing, damaged or of another kind",
}

_CODE = re.compile(r"\[(KVP\d{3})\]")


class KVPolicyError(ValueError):
    """A policy, its configuration or the engine's settings cannot be used.

    The message lists every reason that was found, each with its code, the offending
    value and the remedy.
    """

    @property
    def codes(self) -> tuple[str, ...]:
        """Codes of all reasons, in order."""
        return codes_in(str(self))


def coded(code: str, text: str) -> str:
    """A reason with its stable code in front: ``[KVP104] budget must be ...``.

    Args:
        code: a key of ``CODES``.
        text: what is wrong, with the offending value, and what to do about it.
    """
    assert code in CODES, f"{code} is not in errors.CODES"
    return f"[{code}] {text}"


def codes_in(message: str) -> tuple[str, ...]:
    """All codes in a message, in order, also in one that another process wrote."""
    return tuple(_CODE.findall(message))


def refuse(title: str, reasons: Iterable[str]) -> None:
    """Raise one error that lists all reasons; do nothing when there are none.

    Args:
        title: what cannot be done, without a full stop.
        reasons: one sentence each, with its code, ending in the remedy.

    Raises:
        KVPolicyError: ``reasons`` is not empty.
    """
    listed = list(reasons)
    if listed:
        lines = "".join(f"\n  {i}. {reason}" for i, reason in enumerate(listed, 1))
        raise KVPolicyError(f"{title}:{lines}")
