"""The page of ``kvplugins explain --html``: one file without external resources.

The kept positions of each head are stored as a bitmap in base64 (bit ``p % 8`` of byte
``p // 8`` is position p), about 1 KB per head and 8000 tokens. A script counts them and
shades the text; the rest of the page is plain HTML.
"""

from __future__ import annotations

import base64
import html
import json
from typing import Any

from vllm_kvplugins.cli.explain_assets import SCRIPT, STYLE

LEVELS = 7  # shades; level 0: kept by no head

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header>
<h1>{policy} <small>on {model}</small></h1>
<dl class="facts">{facts}</dl>
<details class="settings" open><summary>Settings</summary><dl>{settings}</dl></details>
</header>
<section>
<h2>Kept tokens per layer and KV head</h2>
<p class="hint">{spread} Click a cell, a layer or a head to see only that one.</p>
<div class="scroll">{strip}</div>
</section>
<section>
<h2>Where in the prompt</h2>
<svg id="density" viewBox="0 0 1000 80" preserveAspectRatio="none" role="img"
 aria-label="Share of tokens kept along the prompt"></svg>
<p class="axis"><span>0</span><span id="density-note"></span><span>{last}</span></p>
</section>
<section>
<div class="bar">
<h2>Prompt</h2>
<label>Layer <select id="layer"><option value="">all</option>{layers}</select></label>
<label>KV head <select id="head"><option value="">all</option>{heads}</select></label>
<button id="reset" type="button">All</button>
<div id="legend" aria-label="Legend"></div>
</div>
<noscript><p>Shading needs JavaScript; the text is shown without it.</p></noscript>
<div id="prompt">{prompt}</div>
</section>
<div id="tip" role="tooltip" hidden></div>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def render(document: dict[str, Any]) -> str:
    """Render the page for a document of ``explain --json``.

    Args:
        document: from ``build_document``.

    Cost: O(tokens + kept positions); the page holds one element per token.
    """
    kept = [
        [head["kept_positions"] for head in layer["kv_heads"]]
        for layer in document["layers"]
    ]
    num_tokens = len(document["tokens"])
    counts = [[len(head) for head in heads] for heads in kept]
    data = {
        "tokens": document["tokens"],
        "ids": document["prompt_token_ids"],
        "layers": len(kept),
        "heads": len(kept[0]),
        "levels": LEVELS,
        "kept": [bitmap(head, num_tokens) for heads in kept for head in heads],
    }
    return _PAGE.format(
        title=html.escape(f"{document['policy']} on {document['model']}"),
        style=STYLE,
        policy=html.escape(document["policy"]),
        model=html.escape(document["model"]),
        facts=_facts(kept, num_tokens),
        settings=_pairs(_flat(document["config"])) or "<dt>none</dt><dd></dd>",
        spread=_spread(counts),
        strip=_strip(counts),
        last=num_tokens - 1,
        layers=_options(len(kept)),
        heads=_options(len(kept[0])),
        prompt="".join(
            f"<span>{html.escape(visible(token))}</span>"
            for token in document["tokens"]
        ),
        data=_embedded(data),
        script=SCRIPT,
    )


def bitmap(positions: list[int], num_tokens: int) -> str:
    """Base64 of a bit per token: bit ``p % 8`` of byte ``p // 8`` is position p."""
    bits = bytearray(-(-num_tokens // 8))
    for position in positions:
        bits[position >> 3] |= 1 << (position & 7)
    return base64.b64encode(bits).decode()


def visible(token: str) -> str:
    """The text of a token with symbols for invisible characters; keeps line ends."""
    signs = {"\n": "↵\n", "\t": "⇥\t"}
    shown = [signs.get(c, chr(0x2400 + ord(c)) if c < " " else c) for c in token]
    return "".join(shown) or "∅"


def _embedded(data: Any) -> str:
    """JSON without characters that an HTML parser could read as markup."""
    text = json.dumps(data, separators=(",", ":"))
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def _facts(kept: list[list[list[int]]], num_tokens: int) -> str:
    counts = [len(head) for heads in kept for head in heads]
    mean = sum(counts) / len(counts)
    anywhere = {position for heads in kept for head in heads for position in head}
    everywhere = set(kept[0][0]).intersection(*(h for heads in kept for h in heads))
    return _pairs(
        {
            "prompt tokens": f"{num_tokens:,}",
            "kept per head (mean)": f"{mean:,.1f}",
            "share kept": f"{mean / num_tokens:.1%}",
            "layers × KV heads": f"{len(kept)} × {len(kept[0])}",
            "kept by every head": f"{len(everywhere):,}",
            "kept by none": f"{num_tokens - len(anywhere):,}",
        }
    )


def _pairs(values: dict[str, str]) -> str:
    return "".join(
        f"<div><dt>{html.escape(key)}</dt><dd>{html.escape(value)}</dd></div>"
        for key, value in values.items()
    )


def _flat(config: dict[str, Any]) -> dict[str, str]:
    return {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in config.items()
    }


def _spread(counts: list[list[int]]) -> str:
    numbers = [count for heads in counts for count in heads]
    low, high = min(numbers), max(numbers)
    if low == high:
        return f"Every head keeps {high:,} tokens."
    return f"From {low:,} to {high:,}; a stronger shade means more."


def _strip(counts: list[list[int]]) -> str:
    """Table of layers (columns) and KV heads (rows), shaded up to the maximum."""
    maximum = max(count for heads in counts for count in heads)
    top = "".join(
        f'<th scope="col" data-layer="{layer}">{layer}</th>'
        for layer in range(len(counts))
    )
    rows = []
    for head in range(len(counts[0])):
        cells = "".join(
            f'<td class="l{-(-LEVELS * heads[head] // maximum)}" data-layer="{layer}" '
            f'data-head="{head}">{heads[head]}</td>'
            for layer, heads in enumerate(counts)
        )
        rows.append(
            f'<tr><th scope="row" data-head="{head}">head {head}</th>{cells}</tr>'
        )
    return (
        f'<table id="strip"><thead><tr><th>layer</th>{top}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def _options(count: int) -> str:
    return "".join(f'<option value="{i}">{i}</option>' for i in range(count))
