"""Extraction of training texts from files with markup."""

from __future__ import annotations

import random
import re

import _pass_key
import router_texts as script
import typer
from typer.testing import CliRunner


def test_html_becomes_what_a_reader_sees(tmp_path):
    page = tmp_path / "page.html"
    page.write_text(
        "<html><head><title>no</title></head><body><nav>no</nav><h1>One &amp; two</h1>"
        "<script>no()</script><p>three   <b>four</b></p>\n\n\n<p>five</p></body></html>"
    )
    assert script.plain(page) == "One & two\nthree four\n\nfive"
    code = tmp_path / "code.py"
    code.write_text("def f():\n    return 1\n\n\n\nx = 2\n")
    assert script.plain(code) == "def f():\n    return 1\n\nx = 2"


def test_each_folder_gives_as_many_long_texts(tmp_path):
    for folder, words in (("a", 50), ("b", 50), ("c", 2)):
        (tmp_path / folder).mkdir()
        for number in range(5):
            (tmp_path / folder / f"{number}.txt").write_text(f"{number} " * words)
    app = typer.Typer()
    app.command()(script.main)
    folders = [str(tmp_path / name) for name in "abc"]
    arguments = [
        *folders,
        "--out",
        str(tmp_path / "out"),
        "--least",
        "60",
        "--most",
        "3",
    ]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    names = sorted(path.name[:5] for path in (tmp_path / "out").iterdir())
    assert names == ["0-000", "0-001", "0-002", "1-000", "1-001", "1-002"]


def test_questions_behind_a_text_have_their_answers_in_it():
    """Every requested value is in the text, near its end, and the wording differs
    from that of the pass-key prompts.
    """
    for seed in range(20):
        draw = random.Random(seed)
        body = "".join(f"Sentence {chr(97 + i % 26)} says little. " for i in range(600))
        sample = script.examined(body, draw, 4000, 6, "<{question}|{answer}>\n")
        text, arguments = sample.split("\n\n")
        turns = [turn[1:-1].split("|") for turn in arguments.splitlines()]
        assert len(turns) == 6
        assert len({question for question, _ in turns}) == 6
        for _, answer in turns:
            value = re.split(r" is | has the [a-z]+ [a-z]+ ", answer)[-1].rstrip(".")
            assert value in text[-6000:], (seed, answer)
            assert value not in text[:5000]
        for word in ("Sentence a ", "Sentence b "):
            assert word in text
        for phrase in ("pass key", "Remember", "memorize", "quiz"):
            assert phrase in _pass_key.TASK + _pass_key.NEEDLE + _pass_key.QUESTION
            assert phrase not in sample


def test_a_share_of_the_texts_asks(tmp_path):
    (tmp_path / "in").mkdir()
    for number in range(30):
        words = " ".join(f"word{i}." for i in range(3000))
        (tmp_path / "in" / f"{number}.txt").write_text(words)
    app = typer.Typer()
    app.command()(script.main)
    arguments = [str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--asked", "0.5"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    texts = [path.read_text() for path in (tmp_path / "out").iterdir()]
    asking = [text for text in texts if "Question: " in text[-300:]]
    assert 8 < len(asking) < 22 < len(texts) == 30
    assert all(len(text) == 12000 for text in texts if text not in asking)
    # other seeds start elsewhere
    assert len({text[:20] for text in texts}) > 25


def test_facts_lie_as_far_back_as_the_reach(tmp_path):
    """A longer prompt needs facts further from its questions."""
    (tmp_path / "in").mkdir()
    words = " ".join(f"word{i}." for i in range(5000))
    (tmp_path / "in" / "a.txt").write_text(words)
    app = typer.Typer()
    app.command()(script.main)

    def first_fact(reach: int) -> int:
        """Characters before the questions at which the first fact stands."""
        out = tmp_path / str(reach)
        folder = str(tmp_path / "in")
        size = ("--least", "40000", "--reach", str(reach), "--asked", "1")
        done = CliRunner().invoke(app, [folder, "--out", str(out), *size])
        assert done.exit_code == 0, done.output
        text, _ = next(out.iterdir()).read_text().split("\n\n")
        return len(text) - re.search(r" (?!word)[^ ]+ ", text).start()

    assert 2500 < first_fact(4000) < 5500
    assert 25000 < first_fact(35000) < 37000
