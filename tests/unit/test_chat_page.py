"""``kvplugins chat`` in a real browser, in front of a fake vLLM server.

Needs Playwright (``pip install playwright``) and a Chromium of the system; Playwright
downloads nothing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="install a vLLM, which brings uvicorn")

from fake_chat_server import FakeServer, serving

from vllm_kvplugins.cli.chat_server import create_app

pytestmark = pytest.mark.slow

WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 800}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    reason = "no Playwright: pip install playwright"
    api = pytest.importorskip("playwright.sync_api", reason=reason)
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox"]
        )
        yield launched
        launched.close()


@pytest.fixture
def vllm() -> Iterator[Any]:
    server = FakeServer()
    with serving(server.app) as base, serving(create_app(base)) as page:
        server.page = page
        yield server


@pytest.fixture
def page(browser, vllm) -> Iterator[Any]:
    """The page, connected. A test fails if a script failed or a rule was broken."""
    opened = browser.new_page(viewport=WIDE)
    opened.set_default_timeout(30_000)
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on(
        "console",
        lambda message: (
            problems.append(message.text)
            if "Content Security Policy" in message.text
            else None
        ),
    )
    opened.goto(vllm.page)
    opened.get_by_text("tiny at").wait_for()
    yield opened
    opened.close()
    assert problems == []


def say(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def wait_for_answers(page: Any, count: int) -> None:
    page.locator(".facts").nth(count - 1).wait_for()
    page.locator("#send").wait_for()
    assert page.locator(".facts").count() == count


def facts(page: Any, turn: int) -> dict[str, str]:
    """The facts under an answer, by label."""
    boxes = page.locator(".facts").nth(turn).locator(".fact")
    return {
        box.locator("dt").inner_text(): box.locator("dd").inner_text()
        for box in boxes.all()
    }


def test_answers_are_streamed_and_say_what_the_policy_did(page, vllm):
    vllm.holds_after = 2
    say(page, "How many pets do I have?")
    bubble = page.locator(".assistant .bubble")
    page.get_by_text("You have").wait_for()
    assert bubble.inner_text().split() == ["You", "have"]
    page.wait_for_timeout(100)
    vllm.release.set()
    wait_for_answers(page, 1)
    assert bubble.inner_text().split() == vllm.answer
    first = facts(page, 0)
    assert first["prompt"] == "100 tokens, 100 computed"
    assert first["from a session"] == "0 tokens"
    assert first["on the device"] == "3 blocks of 4 (75 %)"
    assert first["finished turns"] == "none"
    assert first["compressions"] == "1"
    assert first["session left"] == "5.0 MiB"
    assert first["episode"] == "none"
    assert first["first token"].endswith(" ms")
    tokens, _, speed = first["answer"].partition(", ")
    assert tokens == "7 tokens"
    assert float(speed.removesuffix(" per s")) < 6 / 0.1, "it includes the pause"
    say(page, "And dogs?")
    wait_for_answers(page, 2)
    second = facts(page, 1)
    assert second["prompt"] == "300 tokens, 40 computed"
    assert second["from a session"] == "260 tokens, still on the device"
    assert second["finished turns"] == "2, 240 tokens"
    roles = [message["role"] for message in vllm.bodies[1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert vllm.bodies[1]["messages"][1]["content"].split() == vllm.answer
    assert "policy flowkv" in page.locator("#state").inner_text()
    assert page.locator("#chart li").count() == 2
    assert page.locator("#chart li").nth(1).inner_text().split() == ["2", "96", "320"]


def test_counters_of_the_server_are_marked_as_those_of_all_clients(page, vllm):
    """Another client is answered meanwhile."""
    vllm.holds_after = 2
    say(page, "Hello")
    page.get_by_text("You have").wait_for()
    vllm.count(request_success=2, kv_policy_session_misses=5)
    vllm.release.set()
    wait_for_answers(page, 1)
    shown = page.locator(".counters")
    shown.locator("summary").click()
    text = shown.inner_text()
    assert "over all clients" in text
    assert "2 other requests" in text
    assert "vllm:kv_policy_session_misses_total\t+5" in text


def test_a_server_without_a_report_gives_differences_and_dashes(page, vllm):
    vllm.policy = False
    vllm.counts["vllm:kv_policy_session_restored_tokens_total"] = 7.0
    page.reload()
    page.get_by_text("tiny at").wait_for()
    vllm.holds_after = 2
    say(page, "Hello")
    page.get_by_text("You have").wait_for()
    vllm.count(kv_policy_session_restored_tokens=60)
    vllm.release.set()
    wait_for_answers(page, 1)
    found = facts(page, 0)
    assert found["from a session"] == "60 tokensΔ all clients"
    assert found["prompt"] == "100 tokens", "what was computed is not known"
    for label in ("on the device", "host memory", "session left", "episode"):
        assert found[label] == "–"
    tip = page.locator(".fact.none .tip").first
    assert not tip.is_visible()
    page.locator(".fact.none").first.focus()
    assert tip.is_visible(), "tips open with the keyboard, too"
    assert "Not reported" in tip.inner_text()


def test_stop_ends_the_request_and_keeps_what_was_said(page, vllm):
    vllm.holds_after = 2
    say(page, "Hello")
    page.get_by_text("You have").wait_for()
    page.get_by_role("button", name="Stop").click()
    wait_for_answers(page, 1)
    assert vllm.left.wait(20), "the server learns of it"
    assert page.locator(".mark").inner_text() == "Stopped."
    assert "dog" not in page.locator(".assistant .bubble").inner_text()
    vllm.release.set()
    say(page, "Go on")
    wait_for_answers(page, 2)
    assert vllm.bodies[1]["messages"][1]["content"].startswith("You have")


def test_escape_before_the_first_word_gives_the_message_back(page, vllm):
    vllm.holds_after = 0
    say(page, "Hello")
    page.locator("#stop").wait_for()
    for _ in range(100):
        if vllm.bodies:
            break
        page.wait_for_timeout(50)
    page.keyboard.press("Escape")
    page.locator("#send").wait_for()
    assert vllm.left.wait(20)
    assert page.get_by_label("Message", exact=True).input_value() == "Hello"
    assert page.locator("#messages li").count() == 0


def test_an_error_is_shown_and_the_message_comes_back(page, vllm):
    message = "[KVP502] the prompt needs 9 blocks <b>and</b> the pool has 8"
    vllm.refuses = 400, {"error": {"message": message, "code": 400}}
    say(page, "Hello")
    alert = page.get_by_role("alert")
    alert.wait_for()
    assert alert.inner_text() == message
    field = page.get_by_label("Message", exact=True)
    assert field.input_value() == "Hello"
    vllm.refuses = None
    field.press("Enter")
    wait_for_answers(page, 1)
    assert not alert.is_visible()
    assert len(vllm.bodies[-1]["messages"]) == 1


def test_an_answer_that_breaks_off_is_kept_and_says_so(page, vllm):
    vllm.breaks = True
    say(page, "Hello")
    alert = page.get_by_role("alert")
    alert.wait_for()
    assert alert.inner_text() == "the engine died"
    assert page.locator(".mark").inner_text() == "The answer broke off."


def test_a_server_that_is_down_is_shown_and_found_again(browser):
    server = FakeServer()
    with serving(server.app) as base:
        pass
    port = int(base.rpartition(":")[2])
    with serving(create_app(base)) as address:
        page = browser.new_page()
        page.goto(address)
        page.get_by_text("KVP610").wait_for()
        say(page, "Hello")
        alert = page.get_by_role("alert")
        alert.wait_for()
        assert "KVP610" in alert.inner_text()
        with serving(server.app, port):
            page.get_by_text("tiny at").wait_for()
            page.get_by_role("button", name="Send").click()
            wait_for_answers(page, 1)
        assert not alert.is_visible()
        assert server.bodies[0]["model"] == "tiny"
        page.close()


def test_regenerate_replaces_the_last_answer(page, vllm):
    say(page, "Hello")
    wait_for_answers(page, 1)
    vllm.answer = ["Again"]
    page.get_by_role("button", name="Regenerate").click()
    page.get_by_text("Again").wait_for()
    wait_for_answers(page, 1)
    assert page.locator(".assistant").count() == 1
    assert vllm.bodies[1]["messages"] == vllm.bodies[0]["messages"]


def test_a_new_conversation_forgets_messages_and_keeps_settings(page, vllm):
    page.get_by_text("Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Longest answer").fill("9")
    page.get_by_label("Tenant").fill("alice")
    page.get_by_label("Use sessions").uncheck()
    say(page, "Hello")
    wait_for_answers(page, 1)
    page.get_by_role("button", name="New conversation").click()
    assert page.locator("#messages li").count() == 0
    say(page, "Hi")
    wait_for_answers(page, 1)
    body = vllm.bodies[1]
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    assert (body["max_tokens"], body["cache_salt"]) == (9, "alice")
    assert body["vllm_xargs"]["kv_session"] == 0


def test_a_saved_chat_is_one_that_explain_reads(page, vllm, tmp_path):
    from vllm_kvplugins.cli.inputs import read_chat

    say(page, "Hello")
    wait_for_answers(page, 1)
    with page.expect_download() as download:
        page.get_by_role("button", name="Save chat").click()
    path = tmp_path / "chat.json"
    download.value.save_as(path)
    messages = read_chat(path)
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert json.loads(path.read_text())[0]["content"] == "Hello"


def test_sessions_are_dropped_only_after_a_question(page, vllm):
    button = page.get_by_role("button", name="Drop all sessions")
    questions: list[str] = []

    def decline(dialog: Any) -> None:
        questions.append(dialog.message)
        dialog.dismiss()

    page.once("dialog", decline)
    button.click()
    assert "all clients" in questions[0]
    assert vllm.resets == 0
    page.once("dialog", lambda dialog: dialog.accept())
    button.click()
    page.get_by_text("All sessions were dropped.").wait_for(state="attached")
    assert vllm.resets == 1


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_an_answer_and_its_facts_are_on_the_screen(page, vllm, size):
    page.set_viewport_size(size)
    vllm.answer = ["word" * 60, "w", *(["more"] * 40)]
    say(page, "long" * 80)
    wait_for_answers(page, 1)
    shown = page.locator(".fact").last.bounding_box()
    field = page.locator("#composer").bounding_box()
    assert 0 < shown["y"] + shown["height"] <= field["y"], "facts are above the field"
    end = field["y"] + field["height"]
    assert size["height"] - 40 <= end <= size["height"], "not what is below it"
    page.locator(".counters summary").click()
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= size["width"]
    last = page.locator(".fact").last
    last.focus()
    box = last.locator(".tip").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= size["width"]
