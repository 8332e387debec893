"""A policy next to another KV connector."""

from __future__ import annotations

from typing import Any

import fp8_kernels
from driver import Driver, make_llm
from scenarios_sessions import settle
from texts import random_tokens
from tiny_model import VOCABULARY

LENGTHS = {"short": 45, "middle": 333, "long": 700}
TURN_ENDS = {"short": [20], "middle": [150, 300], "long": [200, 320, 600]}
ANSWER = 40
SEED = 5  # of the drafts that are wrong


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
    drafts: dict[str, Any] | None = None,
    cache: str = "auto",
    emulate: bool = True,
    **settings: Any,
) -> Driver:
    """An engine.

    Args:
        cache: vLLM's type of the cache.
        emulate: run the kernels of an fp8 cache in torch, so that all CPUs run it.
        store: settings of the store; None: no connector.
        drafts: ``answers`` by name of the prompt, of which an oracle drafts tokens, one
            in four of them wrong; or a ``drafter``. None: no speculation.
    """
    arguments = {
        "max_num_batched_tokens": 256,
        "num_gpu_blocks_override": 200,
        "max_model_len": 1024,
        "skip_tokenizer_init": False,  # some policies and drafters need it
        "kv_cache_dtype": cache,
    } | settings
    if cache != "auto" and emulate:
        fp8_kernels.install()
    if store is not None:
        arguments["kv_transfer_config"] = transfer(**store)
    if drafts:
        from scenarios_speculation import NGRAM, Oracle

        arguments |= {
            "speculative_config": drafts.get("drafter", NGRAM),
            "disable_log_stats": False,
        }
    driver = Driver(make_llm(model, policy, **arguments))
    if drafts and "answers" in drafts:
        oracle = Oracle(driver, SEED)
        for name, answer in drafts["answers"].items():
            oracle.learn(prompts()[name] + answer)
    return driver


def ask(
    driver: Driver,
    suffix: str = "",
    names: Any = LENGTHS,
    preempt_at: Any = (),
    answer: int = ANSWER,
) -> dict[str, list[int]]:
    """Run prompts together.

    Args:
        answer: tokens of each answer.
        preempt_at: steps after which all running requests lose their blocks.
    """
    policy = getattr(driver.manager.kv_cache_spec, "policy", None)
    turns = policy.turns if policy else None
    patched = random_tokens(9, 40, VOCABULARY) if turns and turns.history_only else None
    for name in names:
        ends = TURN_ENDS[name] if policy else None
        prompt = prompts()[name]
        driver.add(name + suffix, prompt, answer, turn_ends=ends, patched=patched)
    for step in range(max(preempt_at, default=0)):
        driver.step()
        if step + 1 in preempt_at:
            driver.scheduler.reset_prefix_cache(reset_running_requests=True)
    driver.run()
    for _ in range(3):
        driver.step()  # idle steps: transfers end
    return {name: driver.tokens[name + suffix] for name in names}


def exact(
    model: str,
    path: str,
    drafts: dict[str, Any] | None = None,
    **settings: Any,
) -> dict[str, list[int]]:
    """What an engine without a policy computes and stores."""
    import torch
    from store_connector import STORE

    store = {"loads": "no", "drafts": bool(drafts)}
    driver = engine(model, None, store, drafts, **settings)
    tokens = ask(driver)
    torch.save(STORE, path)
    return tokens


def recomputed(
    model: str, policy: dict[str, Any], **settings: Any
) -> dict[str, list[int]]:
    """Tokens of the policy without another connector."""
    driver = engine(model, policy, None, enable_prefix_caching=False, **settings)
    return ask(driver)


def wrong_contents(path: str, drafted: str | None = None) -> list[int]:
    """Saved blocks that differ from those of an engine without a policy.

    Args:
        drafted: what ``exact`` stored with a drafter, for the drafter's layers.

    Returns:
        Tokens up to the end of each such block.
    """
    import torch
    from store_connector import SEEN

    with_drafter = torch.load(drafted) if drafted else {}
    return differing(SEEN.contents, torch.load(path), with_drafter)


def differing(contents: Any, stock: Any, with_drafter: Any) -> list[int]:
    """What ``wrong_contents`` returns, of any saved blocks."""
    wrong = []
    for key, layers in contents:
        expected = with_drafter.get(key, {}) | stock.get(key, {})
        is_known = key in stock and expected.keys() == layers.keys()
        if not is_known or any(
            differs(block, expected[name]) for name, block in layers.items()
        ):
            wrong.append(len(key))
    return wrong


def differs(ours: Any, theirs: Any) -> bool:
    """Whether two blocks of one layer differ by more than rounding."""
    if ours.is_floating_point():
        return not float((ours - theirs).abs().max()) < 1e-4
    # fp8: rounding may change single elements.
    return float((ours != theirs).float().mean()) > 0.01


def stored(
    model: str,
    policy: dict[str, Any],
    path: str,
    store: dict[str, Any] | None = None,
    filled: bool = False,
    preempt_at: Any = (),
    drafts: dict[str, Any] | None = None,
    drafted: str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Serve prompts twice, with an empty prefix cache each time.

    Args:
        path: what ``exact`` stored.
        filled: the store starts with that.
        drafts: of ``engine``.
        drafted: what ``exact`` stored with a drafter.
    """
    import torch
    from store_connector import SEEN, STORE

    if filled:
        STORE.update(torch.load(drafted or path))
    driver = engine(model, policy, store or {}, drafts, **settings)
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
        "wrong": wrong_contents(path, drafted),
        "types": sorted(
            {str(b.dtype) for _, layers in SEEN.contents for b in layers.values()}
        ),
        "answers": sum(len(key) > LENGTHS[name] for key, name in saved_keys()),
        "layers": sorted({len(layers) for _, layers in SEEN.contents}),
        "longest": max(SEEN.lengths, default=0),
        "layer_saves": SEEN.layers,
        "late": SEEN.late,
        "tracked": driver.check_policy_state(),
        "preemptions": driver.preemptions,
        "scheduler": type(driver.scheduler).__name__,
        "runner": "V2" if hasattr(driver.worker.model_runner, "req_states") else "V1",
        **accepted(driver, drafts),
    }


def accepted(driver: Driver, drafts: dict[str, Any] | None) -> dict[str, int]:
    """vLLM's counters of drafts; empty without speculation."""
    from scenarios_speculation import acceptance

    return acceptance(driver.llm) if drafts else {}


def saved_keys() -> list[tuple[tuple[int, ...], str]]:
    """Keys of all saved blocks, with the name of the prompt."""
    from store_connector import SEEN

    names = {tuple(prompt[:32]): name for name, prompt in prompts().items()}
    return [(key, names[key[:32]]) for key, _ in SEEN.saves]


RANKS = 2


def on_ranks(
    model: str,
    policy: dict[str, Any] | None,
    folder: str,
    exact: str | None = None,
    filled: bool = False,
    drafts: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Serve prompts twice on two ranks of tensor parallelism, one store per rank.

    Args:
        folder: where each rank writes what it saves.
        exact: that folder of an engine without a policy and without drafts.
        filled: the stores start with its blocks.
    """
    from pathlib import Path

    import torch

    store = {"folder": folder, "drafts": policy is None}
    if policy is None:
        store["loads"] = "no"
    if filled:
        store["source"] = exact
    driver = engine(
        model,
        policy,
        store,
        drafts,
        tensor_parallel_size=RANKS,
        distributed_executor_backend="mp",
    )
    names, answer = ("short", "long"), 20  # ranks of one core are slow
    report: dict[str, Any] = {"first": ask(driver, names=names, answer=answer)}
    if policy is not None:
        assert driver.scheduler.reset_prefix_cache()
        report["again"] = ask(driver, "-again", names, answer=answer)
        report["cached"] = driver.cached["long-again"]
        report["tracked"] = driver.llm.collective_rpc("kv_policy_check_integrity")
        report["compactions"] = driver.manager.compactions
        report |= accepted(driver, drafts)
    driver.check_blocks()
    driver.core.model_executor.shutdown()
    if exact is not None:
        files = [f"rank{rank}.pt" for rank in range(RANKS)]
        saved = [torch.load(Path(folder, name)) for name in files]
        stock = [dict(torch.load(Path(exact, name))) for name in files]
        report["saves"] = [len(each) for each in saved]
        report["wrong"] = [
            differing(*pair, {}) for pair in zip(saved, stock, strict=True)
        ]
    return report


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
    model: str,
    policy: dict[str, Any],
    path: str,
    drafts: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Clients leave while their prompts are loaded, and right after."""
    import torch
    from store_connector import STORE

    STORE.update(torch.load(path))
    store = {"loads": "async", "steps": 4}
    driver = engine(model, policy, store, drafts)
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
        "scheduler": type(driver.scheduler).__name__,
        "tokens": first,
        "tracked": driver.check_policy_state(),
    }


def aborted_in_step(
    model: str, policy: dict[str, Any], path: str, drafts: dict[str, Any]
) -> dict[str, Any]:
    """Clients leave after the model has verified drafts and before vLLM counts them.

    The store saves the blocks of a request when it ends.
    """
    driver = engine(model, policy, {"keeps": True, "loads": "no"}, drafts)
    count = driver.scheduler.update_from_output
    unverified: list[int] = []

    def leave(output: Any, *args: Any) -> Any:
        lengths = output.scheduled_spec_decode_tokens
        for request_id, tokens in lengths.items():
            request = driver.scheduler.requests[request_id]
            # The step fills a block with drafts.
            if request.num_computed_tokens // 32 > request.num_tokens // 32:
                unverified.append(len(tokens))
                driver.core.abort_requests([request_id])
        return count(output, *args)

    driver.scheduler.update_from_output = leave
    names = ["short", "middle"]
    for name in names:
        driver.add(name, prompts()[name], ANSWER, turn_ends=[])
    for _ in range(60):
        driver.step()
    driver.check_blocks()
    return {
        "unverified": unverified,
        "wrong": wrong_contents(path),
        "saved": len(saved_keys()),
        "tracked": driver.check_policy_state(),
    }


def one_left(
    model: str, policy: dict[str, Any], path: str | None, speculates: bool
) -> dict[str, Any]:
    """All tokens of a prompt but one are there, and a compaction follows the last one.

    Args:
        path: what ``exact`` stored; None: a session has the tokens.
    """
    import torch
    from store_connector import STORE

    drafts = {"answers": {}} if speculates else None
    driver = engine(model, policy, {} if path else None, drafts)
    prompt = prompts()["long"][:321]
    if path:
        STORE.update(torch.load(path))
    else:
        prompt += driver.generate({"first": prompt}, ANSWER)["first"]
        settle(driver)  # a reset drops sessions that are not saved yet
        assert driver.scheduler.reset_prefix_cache()
    before = driver.manager.compactions
    tokens = driver.generate({"again": prompt}, ANSWER)["again"]
    return {
        "tokens": tokens,
        "left": len(prompt) - driver.cached["again"],
        "compactions": driver.manager.compactions - before,
    }


def failed(
    model: str,
    policy: dict[str, Any],
    path: str,
    store: dict[str, Any],
    drafted: str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """A block cannot be loaded, while other requests run."""
    import torch
    from store_connector import SEEN, STORE

    STORE.update(torch.load(drafted or path))
    driver = engine(model, policy, store, **settings)
    tokens = ask(driver)
    driver.check_blocks()
    return {
        "tokens": tokens,
        "scheduler": type(driver.scheduler).__name__,
        "loads": SEEN.loads,
        "preemptions": driver.preemptions,
        "finished": len(SEEN.finished),
        "wrong": wrong_contents(path, drafted),
        "tracked": driver.check_policy_state(),
    }


def shared(
    model: str,
    policy: dict[str, Any] | None,
    folder: str,
    names: list[str],
    role: str,
    multi: bool = False,
    drafts: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Serve prompts with vLLM's ExampleConnector, one after the other.

    Its files have whole prompts, so each prompt must be one chunk.
    """
    from pathlib import Path

    store = {"shared_storage_path": folder, "role": role, "multi": multi}
    driver = engine(model, policy, store, drafts, max_num_batched_tokens=1024)
    tokens = {}
    for name in names:
        tokens |= ask(driver, names=[name])
    return {
        "tokens": tokens,
        "cached": {name: driver.cached[name] for name in names},
        "files": len(list(Path(folder).glob("*/*.safetensors"))),
        **accepted(driver, drafts),
    }
