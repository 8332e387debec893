"""KV-cache policies for an unmodified vLLM.

``vllm serve MODEL --kv-policy snapkv``, or offline::

    from vllm import LLM
    import vllm_kvplugins

    llm = LLM(MODEL, **vllm_kvplugins.engine_args("snapkv", budget=512))
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"


def engine_args(policy: str, **options: Any) -> dict[str, Any]:
    """Keyword arguments for ``vllm.LLM`` that enable a policy.

    Args:
        policy: a name from ``kvplugins list``, or ``auto``.
        options: the policy's settings, for example ``budget=512``.

    Returns:
        ``{"additional_config": {"kv_policy": …}}``. If you pass your own
        ``additional_config``, merge the two.

    Raises:
        KVPolicyError: the policy or a setting is unknown, or a value is invalid.
    """
    from vllm_kvplugins.config import check_request

    request = {"name": policy, **options}
    check_request(request)
    return {"additional_config": {"kv_policy": request}}


__all__ = ["__version__", "engine_args"]
