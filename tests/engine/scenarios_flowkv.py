"""Conversations under FlowKV, in a real engine."""

from __future__ import annotations

from typing import Any

from driver import Driver, make_llm
from texts import random_tokens
from tiny_model import VOCABULARY


def _held(driver: Driver, name: str) -> int:
    blocks = driver.manager.req_to_blocks[name]
    return sum(not block.is_null for block in blocks)


def conversation(
    model: str,
    policy: dict[str, Any],
    turns: list[int],
    company: int,
    settings: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A history that grows from request to request, every turn one longer.

    Returns:
        Per request the kept positions of its compactions [compaction][layer][head],
        its tokens, and how many blocks it held when it decoded, beside the plan's.
    """
    llm = make_llm(model, policy, num_gpu_blocks_override=400, **(settings or {}))
    driver = Driver(llm)
    whole = random_tokens(5, turns[-1] + 70, VOCABULARY)
    llm.collective_rpc("kv_policy_record", args=(True,))
    requests = []
    for number in range(1, len(turns) + 1):
        ends = turns[:number]
        name = f"turn-{number}"
        driver.add(name, whole[: ends[-1] + 70], 20, turn_ends=ends)
        others = [f"{name}-{i}" for i in range(company)]
        for index, other in enumerate(others):
            driver.add(
                other,
                random_tokens(index, 400 + 90 * index, VOCABULARY),
                20,
                turn_ends=[],
            )
        request = next(
            r
            for r in (*driver.scheduler.waiting, *driver.scheduler.running)
            if r.request_id.startswith(name) and r.request_id not in others
        )
        driver.step_until(lambda name=name: len(driver.tokens[name]) >= 3)
        plan = driver.manager.plans.of(request)
        held = _held(driver, request.request_id)
        planned = plan.resident_blocks(request.num_computed_tokens)
        driver.run()
        driver.check_blocks()
        (records,) = llm.collective_rpc("kv_policy_take_records")
        kept = [r.kept_positions for r in records if r.request_id == request.request_id]
        requests.append(
            {
                "kept": kept,
                "tokens": driver.tokens[name],
                "held": held,
                "planned": planned,
                "compactions": len(plan.compactions),
            }
        )
    driver.step()
    assert driver.check_policy_state() == 0
    return {"requests": requests}


def tool_loop(
    model: str,
    policy: dict[str, Any],
    rounds: int,
    result: int,
    patched: list[int] | None = None,
) -> dict[str, Any]:
    """All requests of a turn with a tool loop, and of the next turn.

    Each is sent twice: continuing the session of the one before, and without sessions.

    Args:
        rounds: the model is asked so often for a call; results have ``result`` tokens.
        patched: patched prompt of all requests.

    Returns:
        Per request: its length, both answers, restored tokens, where it was compacted,
        how many blocks it held when it decoded, and those of its plan; for each of its
        compactions, the fewest tokens of the question that a head kept.
    """
    llm = make_llm(
        model,
        policy,
        num_gpu_blocks_override=400,
        max_model_len=4096,
        skip_tokenizer_init=False,
    )
    driver = Driver(llm)
    llm.collective_rpc("kv_policy_record", args=(True,))
    prompt = random_tokens(1, 230, VOCABULARY)
    question = range(150, 230)
    ends, parts, requests = [question.start], [question.stop], []
    for number in range(rounds + 2):
        name = f"request-{number}"
        # The newest round is not finished.
        finished = parts if number > rounds else parts[:-1]
        turns = {
            "turn_ends": list(ends),
            "loop_ends": finished if len(finished) > 1 else [],
            "patched": patched,
        }
        driver.add(f"{name}-alone", prompt, 4, kv_session=False, salt="other", **turns)
        driver.run()
        llm.collective_rpc("kv_policy_take_records")
        driver.add(name, prompt, 4, **turns)
        (request,) = (*driver.scheduler.waiting, *driver.scheduler.running)
        driver.step_until(lambda name=name: len(driver.tokens[name]) >= 3)
        plan = driver.manager.plans.of(request)
        held = _held(driver, request.request_id)
        planned = plan.resident_blocks(request.num_computed_tokens)
        driver.run()
        driver.step()
        (records,) = llm.collective_rpc("kv_policy_take_records")
        requests.append(
            {
                "tokens": len(prompt),
                "answers": [driver.tokens[name], driver.tokens[f"{name}-alone"]],
                "restored": driver.cached.get(name, 0),
                "compacted_at": [record.computed_tokens for record in records],
                "held": held,
                "planned": planned,
                "of_question": [
                    min(
                        len(set(question) & set(head))
                        for layer in record.kept_positions
                        for head in layer
                    )
                    for record in records
                ],
            }
        )
        prompt = prompt + driver.tokens[name]
        if number < rounds:
            prompt = prompt + random_tokens(9 + number, result, VOCABULARY)
            parts.append(len(prompt))
        else:
            ends.append(len(prompt))
            prompt = prompt + random_tokens(99, 40, VOCABULARY)
    driver.check_blocks()
    driver.step()
    assert driver.check_policy_state() == 0
    return {"requests": requests, "ends": ends, "parts": parts}


def refusals(model: str, turn_ends: list[Any]) -> dict[str, Any]:
    """The refusal of each invalid ``turn_ends``; the engine goes on."""
    from vllm.exceptions import VLLMValidationError

    driver = Driver(make_llm(model, {"name": "flowkv"}, max_model_len=2048))

    def refusal(name: str, ends: Any) -> str:
        try:
            driver.add(name, random_tokens(1, 100, VOCABULARY), 20, turn_ends=ends)
        except VLLMValidationError as error:
            return str(error)
        return ""

    messages = [refusal(str(number), ends) for number, ends in enumerate(turn_ends)]
    driver.add("sound", random_tokens(1, 100, VOCABULARY), 20, turn_ends=[60])
    driver.run()
    return {"messages": messages, "tokens": driver.tokens["sound"]}


def chat(
    model: str, policy: dict[str, Any], template: str | None = None
) -> dict[str, Any]:
    """Turns from the chat template of a real model, or from another one."""
    from vllm import SamplingParams

    settings = {"skip_tokenizer_init": False, "max_model_len": 2048}
    llm = make_llm(model, policy, chat_template=template, **settings)
    llm.collective_rpc("kv_policy_record", args=(True,))
    fact = "My cat is called Tom and he is orange. " * 8
    messages = [
        {"role": "user", "content": fact},
        {"role": "assistant", "content": "Hello Tom, nice to meet you! " * 10},
        {"role": "user", "content": "Tell me of the sea, please. " * 9},
        {"role": "assistant", "content": "The sea is deep and blue. " * 12},
        {"role": "user", "content": "What is my cat called?"},
    ]
    (output,) = llm.chat(
        [messages], SamplingParams(temperature=0, max_tokens=12), use_tqdm=False
    )
    (records,) = llm.collective_rpc("kv_policy_take_records")
    tokenizer = llm.get_tokenizer()
    ids = list(output.prompt_token_ids)
    ends = [i + 1 for i, token in enumerate(ids) if token == tokenizer.eos_token_id]
    texts = [tokenizer.decode(ids[: 1 + max(r.kept_positions[0][0])]) for r in records]
    return {
        "answer": output.outputs[0].text,
        "messages": len(ends),
        "ends": ends,
        "compacted_at": [1 + max(r.kept_positions[0][0]) for r in records],
        "compacted_texts": texts,
    }


def agent(model: str, policy: dict[str, Any], family: str) -> dict[str, Any]:
    """All requests of a conversation with tools, under a template of another family.

    Returns:
        Per request: turn ends by the engine's front end, the text before the last one,
        and the number of tokens that each compaction covered.
    """
    import chat_fixtures
    from vllm import SamplingParams

    settings = {"skip_tokenizer_init": False, "max_model_len": 4096}
    llm = make_llm(model, policy, **settings)
    driver = Driver(llm)
    sent = []
    add = driver.core.add_request

    def record_parameters(request: Any, *arguments: Any) -> Any:
        sent.append(request.sampling_params.extra_args or {})
        return add(request, *arguments)

    driver.core.add_request = record_parameters
    llm.collective_rpc("kv_policy_record", args=(True,))
    template = chat_fixtures.TEMPLATES[family]
    tokenizer = llm.get_tokenizer()
    requests = []
    for messages in chat_fixtures.requests_of(
        chat_fixtures.conversation(template.alternates)
    ):
        (output,) = llm.chat(
            [messages],
            SamplingParams(temperature=0, max_tokens=2),
            use_tqdm=False,
            chat_template=template.text,
            tools=chat_fixtures.TOOLS,
        )
        driver.step()
        (records,) = llm.collective_rpc("kv_policy_take_records")
        ends = sent[-1].get("turn_ends", [])
        history = output.prompt_token_ids[: ends[-1] if ends else 0]
        requests.append(
            {
                "ends": ends,
                "history": tokenizer.decode(history),
                "compacted_at": [1 + max(r.kept_positions[0][0]) for r in records],
            }
        )
    return {"requests": requests}
