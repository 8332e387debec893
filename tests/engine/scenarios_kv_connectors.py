"""A policy next to another KV connector."""

from __future__ import annotations

from typing import Any

from driver import Driver, make_llm
from texts import random_tokens
from tiny_model import VOCABULARY

LENGTHS = {"short": 45, "middle": 333, "long": 700}
TURN_ENDS = {"short": [20], "middle": [150, 300], "long": [200, 320, 600]}
ANSWER = 40


def prompts() -> dict[str, list[int]]:
    return {
        name: random_tokens(seed, length, VOCABULARY)
        for seed, (name, length) in enumerate(LENGTHS.items())
    }


def transfer(role: str = "kv_both", **settings: Any) -> Any:
    """The store of this process, or vLLM's ExampleConnector if there is a folder."""
    from vllm.config import KVTransferConfig

    policy = settings.pop("failure_policy", "fail")
    own: dict[str, Any] = {
        "kv_connector": "StoreConnector",
        "kv_connector_module_path": "store_connector",
    }
    if "shared_storage_path" in settings:
        own = {"kv_connector": "ExampleConnector"}
    own |= {"kv_role": role, "kv_connector_extra_config": settings}
    if settings.pop("multi", False):
        own = {
            "kv_connector": "MultiConnector",
            "kv_role": role,
            "kv_connector_extra_config": {"connectors": [own]},
        }
    return KVTransferConfig(**own, kv_load_failure_policy=policy)


def engine(
    model: str,
    policy: dict[str, Any] | None,
    store: dict[str, Any] | None,
    **settings: Any,
) -> Driver:
    arguments = {
        "max_num_batched_tokens": 256,
        "num_gpu_blocks_override": 200,
        "max_model_len": 1024,
    } | settings
    if store is not None:
        arguments["kv_transfer_config"] = transfer(**store)
    return Driver(make_llm(model, policy, **arguments))


def ask(
    driver: Driver, suffix: str = "", names: Any = LENGTHS, preempt_at: Any = ()
) -> dict[str, list[int]]:
    """Run prompts together.

    Args:
        preempt_at: steps after which all running requests lose their blocks.
    """
    has_turns = hasattr(driver.manager, "plans")
    for name in names:
        ends = TURN_ENDS[name] if has_turns else None
        driver.add(name + suffix, prompts()[name], ANSWER, turn_ends=ends)
    for step in range(max(preempt_at, default=0)):
        driver.step()
        if step + 1 in preempt_at:
            driver.scheduler.reset_prefix_cache(reset_running_requests=True)
    driver.run()
    for _ in range(3):
        driver.step()  # idle steps: transfers end
    return {name: driver.tokens[name + suffix] for name in names}


def exact(model: str, path: str) -> dict[str, list[int]]:
    """What an engine without a policy computes and stores."""
    import torch
    from store_connector import STORE

    driver = engine(model, None, {"loads": "no"})
    tokens = ask(driver)
    torch.save(STORE, path)
    return tokens


def recomputed(
    model: str, policy: dict[str, Any], **settings: Any
) -> dict[str, list[int]]:
    """Tokens of the policy without another connector."""
    driver = engine(model, policy, None, enable_prefix_caching=False, **settings)
    return ask(driver)


def wrong_contents(path: str) -> list[Any]:
    """Saved blocks that differ from those of an engine without a policy.

    Returns:
        Per such block: tokens up to its end, largest difference; inf: unknown text.
    """
    import torch
    from store_connector import SEEN

    stock = torch.load(path)
    wrong = []
    for key, layers in SEEN.contents:
        worst = float("inf")
        if key in stock:
            pairs = zip(layers.values(), stock[key].values(), strict=True)
            worst = max(float((ours - theirs).abs().max()) for ours, theirs in pairs)
        if not worst < 1e-4:
            wrong.append([len(key), str(worst)])
    return wrong


def stored(
    model: str,
    policy: dict[str, Any],
    path: str,
    store: dict[str, Any] | None = None,
    filled: bool = False,
    preempt_at: Any = (),
    ahead: bool = False,
) -> dict[str, Any]:
    """Serve prompts twice, with an empty prefix cache each time.

    Args:
        path: what ``exact`` stored.
        filled: the store starts with that.
    """
    import torch
    from store_connector import SEEN, STORE

    if filled:
        STORE.update(torch.load(path))
    driver = engine(model, policy, store or {}, async_scheduling=ahead)
    first = ask(driver, preempt_at=preempt_at)
    saves = len(SEEN.saves)
    assert driver.scheduler.reset_prefix_cache()
    again = ask(driver, "-again", preempt_at=preempt_at)
    driver.check_blocks()
    connector = driver.scheduler.connector
    if policy is not None:
        assert not connector._offers
        assert not connector._arriving
        assert len(connector._connectors[0].exact_prefix) == 0
    return {
        "first": first,
        "again": again,
        "cached": [driver.cached[name + "-again"] for name in LENGTHS],
        "saves": saves,
        "saved_again": len(SEEN.saves) - saves,
        "loads": SEEN.loads,
        "released": SEEN.released,
        "finished": SEEN.finished,
        "wrong": wrong_contents(path),
        "longest": max(SEEN.lengths, default=0),
        "tracked": driver.check_policy_state(),
        "preemptions": driver.preemptions,
    }


def longer(model: str, policy: dict[str, Any], path: str) -> dict[str, Any]:
    """A session and the store hold beginnings of one prompt.

    Returns:
        Cached tokens, loaded blocks and continued sessions, where the store holds more,
        where the session does, and where both hold as much.
    """
    import torch
    from store_connector import SEEN, STORE

    stock = torch.load(path)
    driver = engine(model, policy, {})
    whole = prompts()["long"]
    report: dict[str, Any] = {"cached": [], "loads": [], "hits": []}

    def one(name: str, prompt: list[int], salt: str) -> None:
        assert driver.scheduler.reset_prefix_cache()
        driver.add(name, prompt, 12, turn_ends=[], salt=salt)
        driver.run()
        for _ in range(3):
            driver.step()

    hits = driver.scheduler.connector.sessions.directory.counts
    # (tokens of the session's prompt, blocks in the store)
    for number, (session, blocks) in enumerate([(200, 15), (600, 5), (480, 15)]):
        salt = f"salt{number}"
        STORE.clear()
        one(f"first{number}", whole[:session], salt)
        STORE.clear()
        STORE.update(
            {key: value for key, value in stock.items() if len(key) <= 32 * blocks}
        )
        before = SEEN.loads, hits.hits
        one(f"next{number}", whole, salt)
        report["loads"].append(SEEN.loads - before[0])
        report["hits"].append(hits.hits - before[1])
        report["cached"].append(driver.cached[f"next{number}"])
    driver.check_blocks()
    return report | {"tracked": driver.check_policy_state()}


def aborted(
    model: str, policy: dict[str, Any], path: str, ahead: bool
) -> dict[str, Any]:
    """Clients leave while their prompts are loaded, and right after."""
    import torch
    from store_connector import STORE

    STORE.update(torch.load(path))
    store = {"loads": "async", "steps": 4}
    driver = engine(model, policy, store, async_scheduling=ahead)
    left = {}
    for steps in range(7):
        name = f"leaves{steps}"
        driver.add(name, prompts()["long"], ANSWER, turn_ends=[])
        for _ in range(steps):
            driver.step()
        request = next(
            each for key, each in driver.scheduler.requests.items() if name in key
        )
        left[str(request.status).split(".")[-1]] = True
        driver.abort([name])
        for _ in range(8):
            driver.step()
        assert not driver.scheduler.requests
        driver.check_blocks()
    first = driver.generate({"stays": prompts()["long"]}, ANSWER)["stays"]
    for _ in range(3):
        driver.step()
    return {
        "states": sorted(left),
        "tokens": first,
        "tracked": driver.check_policy_state(),
    }


def failed(
    model: str,
    policy: dict[str, Any],
    path: str,
    store: dict[str, Any],
    **settings: Any,
) -> dict[str, Any]:
    """A block cannot be loaded, while other requests run."""
    import torch
    from store_connector import SEEN, STORE

    STORE.update(torch.load(path))
    driver = engine(model, policy, store, **settings)
    tokens = ask(driver)
    driver.check_blocks()
    return {
        "tokens": tokens,
        "loads": SEEN.loads,
        "preemptions": driver.preemptions,
        "finished": len(SEEN.finished),
        "wrong": wrong_contents(path),
        "tracked": driver.check_policy_state(),
    }


def shared(
    model: str,
    policy: dict[str, Any] | None,
    folder: str,
    names: list[str],
    role: str,
    multi: bool = False,
) -> dict[str, Any]:
    """Serve prompts with vLLM's ExampleConnector, one after the other.

    Its files have whole prompts, so each prompt must be one chunk.
    """
    from pathlib import Path

    store = {"shared_storage_path": folder, "role": role, "multi": multi}
    driver = engine(model, policy, store, max_num_batched_tokens=1024)
    tokens = {}
    for name in names:
        tokens |= ask(driver, names=[name])
    return {
        "tokens": tokens,
        "cached": {name: driver.cached[name] for name in names},
        "files": len(list(Path(folder).glob("*/*.safetensors"))),
    }
