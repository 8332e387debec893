"""Conversations whose queries are routed to different episodes."""

from __future__ import annotations

import time
from typing import Any

import fsspec
import torch
from driver import Driver, make_llm
from scenarios_sessions import counts, finish, settle
from texts import random_tokens, two_topics
from tiny_model import VOCABULARY

HISTORY, QUERY, ANSWER = 900, 45, 20


class StepObserver:
    """Checks that probes change neither pages nor computed hidden states.

    Attributes:
        probed: forward passes of probes, with how many requests shared each.
    """

    def __init__(self, driver: Driver) -> None:
        self.probed: list[int] = []
        self._computed: list[tuple[Any, Any]] = []
        model = driver.worker.model_runner.model
        model.register_forward_hook(self._note)
        self._driver = driver
        self._watched = False

    def step(self) -> None:
        self._computed = []
        self._driver.step()
        if not self._watched and self._driver.runtime.prober is not None:
            self._watch(self._driver.runtime.prober)
        for output, copy in self._computed:
            assert torch.equal(output, copy), "hidden states changed"

    def _note(self, module: Any, inputs: Any, output: Any) -> None:
        self._computed.append((output, output.clone()))

    def _watch(self, prober: Any) -> None:
        run, forward = prober.run, prober._forward
        self._watched = True

        def watched(requests: Any) -> None:
            pages = self._driver.runtime.heap.pages
            before = pages.clone()
            run(requests)
            same = (pages == before) | (pages.isnan() & before.isnan())
            assert same.all(), "a probe wrote to the cache"

        def counted(batch: Any) -> None:
            self.probed.append(len(batch))
            forward(batch)

        prober.run, prober._forward = watched, counted


def conversation(
    model: str,
    policy: dict[str, Any],
    guides: list[list[int]],
    route: list[int],
    settings: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A conversation with queries to these episodes; each query also runs from
    scratch.

    Returns:
        answers and "recomputed" [turn], tokens restored [turn], most blocks that the
        conversation held at once while its history was read, and graphs compiled.
    """
    arguments = {"skip_tokenizer_init": False, "max_model_len": 4096}
    arguments |= {"num_gpu_blocks_override": 600} | (settings or {})
    driver = Driver(make_llm(model, policy, **arguments))
    watch = StepObserver(driver)
    prompt = random_tokens(1, HISTORY, VOCABULARY)
    report: dict[str, Any] = {
        "answers": [],
        "recomputed": [],
        "restored": [],
        "held": [],
    }
    for turn, episode in enumerate(route):
        end = len(prompt)
        prompt = prompt + random_tokens(10 + turn, QUERY, VOCABULARY)
        names = {"answers": "alice", "recomputed": f"nobody{turn}"}
        before = counts(driver)["restored_tokens"]
        for kind, salt in names.items():
            name = f"{kind}{turn}"
            driver.add(name, prompt, ANSWER, False, [end], salt, guides[episode])
            if kind == "recomputed":  # other requests run in the same steps
                company = random_tokens(50 + turn, 700, VOCABULARY)
                driver.add(f"company{turn}", company, 4, False, [650], "c", guides[0])
            most_blocks = 0
            while driver.busy:
                watch.step()
                most_blocks = max(most_blocks, _held(driver, name, end))
            report["held"].append(most_blocks)
            report[kind].append(driver.tokens[name])
            settle(driver)
            if kind == "answers":
                current = counts(driver)["restored_tokens"]
                report["restored"].append(current - before)
        prompt = prompt + report["answers"][-1]
    driver.check_blocks()
    driver.scheduler.connector.sessions.directory.check_integrity()
    tracked = driver.check_policy_state()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return report | {"tracked": tracked, "probed": watch.probed, "graphs": graphs}


def _held(driver: Driver, name: str, history: int) -> int:
    """Blocks of a request while its history is prefilled."""
    for request in driver.scheduler.running:
        if request.request_id.startswith(name):
            blocks = driver.manager.req_to_blocks[request.request_id]
            read = request.num_computed_tokens <= history
            return read * sum(not block.is_null for block in blocks)
    return 0


def chats(model: str, policy: dict[str, Any]) -> dict[str, Any]:
    """Chat requests to a real model: what the engine received, and what it did."""
    llm = make_llm(model, policy, skip_tokenizer_init=False, max_model_len=4096)
    driver = Driver(llm)
    parameters = []
    add = driver.core.add_request

    def record_parameters(request: Any, *arguments: Any) -> Any:
        parameters.append(request.sampling_params.extra_args)
        return add(request, *arguments)

    driver.core.add_request = record_parameters
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=8)
    messages = two_topics()
    answers, restored = [], []
    for query in ("Which fruit ripens?", "When does the train leave?", "And pears?"):
        messages.append({"role": "user", "content": query})
        before = counts(driver)["restored_tokens"]
        (output,) = llm.chat(messages, params, use_tqdm=False)
        settle(driver)
        answers.append(output.outputs[0].text)
        restored.append(counts(driver)["restored_tokens"] - before)
        messages.append({"role": "assistant", "content": answers[-1]})
    from vllm_kvplugins import episodic

    before_build, talk = len(parameters), episodic.build(llm, messages)
    built = [len(t["patched_prompt"]) for t in parameters[before_build:]]
    before = counts(driver)["restored_tokens"]
    answer = talk.ask("And the mountains?", params)
    current = counts(driver)["restored_tokens"]
    assert talk.messages[-1] == {"role": "assistant", "content": answer}
    tokenizer = llm.get_tokenizer()
    patched_prompts = [tokenizer.decode(t["patched_prompt"]) for t in parameters]
    return {
        "patched_prompts": patched_prompts,
        "parameters": parameters,
        "restored": restored,
        "built": built,
        "restored_after": current - before,
    }


def part_of_a_chat(
    model: str,
    policy: dict[str, Any],
    messages: list[dict[str, str]] | None,
    queries: list[str],
    folder: str,
    drops: bool = False,
) -> dict[str, Any]:
    """A part of a conversation, in an engine that starts for it and then ends.

    Args:
        messages: of the conversation so far; None: about two topics.
        folder: URL of the place where sessions are stored.
        drops: drop all caches at the end.

    Returns:
        per query the tokens that were restored and the patched prompt; all messages;
        numbers of files of clusterings, before and after all caches were dropped.
    """
    llm = make_llm(model, policy, skip_tokenizer_init=False, max_model_len=4096)
    driver = Driver(llm)
    patched: list[str] = []
    add = driver.core.add_request

    def record(request: Any, *arguments: Any) -> Any:
        tokens = request.sampling_params.extra_args["patched_prompt"]
        patched.append(llm.get_tokenizer().decode(tokens))
        return add(request, *arguments)

    driver.core.add_request = record
    from vllm import SamplingParams

    messages, restored = messages or two_topics(), []
    for query in queries:
        messages = [*messages, {"role": "user", "content": query}]
        before = counts(driver)["restored_tokens"]
        (output,) = llm.chat(
            messages, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False
        )
        settle(driver)
        restored.append(counts(driver)["restored_tokens"] - before)
        answer = {"role": "assistant", "content": output.outputs[0].text}
        messages = [*messages, answer]
    finish(driver)

    def files_are(count: int) -> int:
        """Wait for the threads of the front end or the scheduler."""
        deadline = time.monotonic() + 20
        while True:
            store, path = fsspec.core.url_to_fs(folder, use_listings_cache=False)
            names = store.find(path) if store.exists(path) else ()
            found = sum(name.endswith(".clustering.safetensors") for name in names)
            if found == count or time.monotonic() > deadline:
                return found
            time.sleep(0.01)

    report = {"messages": messages, "restored": restored, "patched": patched}
    report |= {"counts": counts(driver), "files": [files_are(1)]}
    if drops:
        assert driver.scheduler.reset_prefix_cache(reset_connector=True)
        report["files"].append(files_are(0))
    return report | {"tracked": driver.check_policy_state()}


def served(model: str, policy: dict[str, Any]) -> dict[str, Any]:
    """Queries to a running server's engine, which builds episodes while idle.

    Returns:
        Tokens of each prompt and how many of them were restored.
    """
    import asyncio

    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.renderers import ChatParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from vllm_kvplugins.vllm_adapter.frontend.episode_builds import builder_of

    arguments = AsyncEngineArgs(
        model,
        additional_config={"kv_policy": policy},
        dtype="float32",
        enforce_eager=True,
        max_model_len=4096,
        num_gpu_blocks_override=400,
    )
    params = SamplingParams(temperature=0, max_tokens=8)

    async def ask(engine: Any, messages: Any) -> Any:
        template = ChatParams(chat_template_kwargs={"add_generation_prompt": True})
        tokens = engine.renderer.default_chat_tok_params
        _, (prompt,) = await engine.renderer.render_chat_async(
            [messages], template, tokens.with_kwargs(add_special_tokens=False)
        )
        async for output in engine.generate(prompt, params, f"r{len(messages)}"):
            last = output
        return last

    async def scene() -> list[list[int]]:
        engine = AsyncLLM.from_engine_args(arguments)
        messages, report = two_topics(), []
        try:
            for query in ("Which fruit ripens?", "When does the train leave?"):
                messages.append({"role": "user", "content": query})
                output = await ask(engine, messages)
                report.append([len(output.prompt_token_ids), output.num_cached_tokens])
                answer = {"role": "assistant", "content": output.outputs[0].text}
                messages.append(answer)
                builder = builder_of(engine)
                while builder.num_waiting or builder.running:
                    await asyncio.sleep(0.05)
        finally:
            engine.shutdown()
        return report

    return {"answers": asyncio.run(scene())}


def scored(
    model: str,
    policy: dict[str, Any],
    patched: dict[str, list[int]],
    query: int,
    max_tokens: int,
    prompts: dict[str, list[int]] | None = None,
) -> dict[str, Any]:
    """Prefill histories of these lengths together; returns the probes' scores and
    the kept tokens.

    Args:
        patched: by length, the patched prompt.
        query: tokens behind the history.
        prompts: by length, history and query; random ones if none are given.

    Returns:
        Per length ``prompt``, ``tokens``, and ``compactions``: ``at_tokens``, ``kept``
        and ``worth`` [layers][kv_heads][tokens].
    """
    arguments = {"skip_tokenizer_init": False, "max_model_len": 4096}
    driver = Driver(make_llm(model, policy, num_gpu_blocks_override=400, **arguments))
    driver.generate({"first": [1, 2, 3]}, 1)  # the first step creates the prober
    driver.llm.collective_rpc("kv_policy_record", args=(True,))
    requests_seen: list[Any] = []
    runs: dict[str, Any] = {}
    for length, tokens in patched.items():
        if prompts is None:
            prompt = random_tokens(int(length), int(length) + query, VOCABULARY)
        else:
            prompt = prompts[length]
        driver.add(length, prompt, max_tokens, False, [int(length)], None, tokens)
        runs[length] = {"prompt": prompt, "compactions": []}
    prober = driver.runtime.prober
    run = prober.run

    def watched(requests: Any) -> None:
        run(requests)
        requests_seen.extend(requests)

    prober.run = watched
    driver.run()
    (records,) = driver.llm.collective_rpc("kv_policy_take_records")
    assert len(records) == len(requests_seen)
    for record, request in zip(records, requests_seen, strict=True):
        length = str(record.prompt_tokens - query)
        layers = [
            request.observed[layer].tolist() for layer in range(len(request.observed))
        ]
        runs[length]["compactions"].append(
            {
                "at_tokens": request.tokens,
                "kept": record.kept_positions,
                "worth": layers,
            }
        )
    for length, report in runs.items():
        report["tokens"] = driver.tokens[length]
    return runs
