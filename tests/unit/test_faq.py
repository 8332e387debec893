"""docs/faq.md explains every error code, and the package uses every code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vllm_kvplugins.errors import CODES, KVPolicyError, coded, codes_in, refuse

ROOT = Path(__file__).parents[2]
ROWS = re.compile(r"^\| (KVP\d{3}) \| (.+?) \|", re.MULTILINE)


def used_codes() -> set[str]:
    """Codes that the package's source passes to ``coded`` or writes directly."""
    sources = (ROOT / "vllm_kvplugins").rglob("*.py")
    text = "".join(
        path.read_text(encoding="utf-8") for path in sources if path.name != "errors.py"
    )
    return set(re.findall(r"KVP\d{3}", text))


def test_the_faq_has_a_row_for_every_code():
    rows = dict(ROWS.findall((ROOT / "docs" / "faq.md").read_text(encoding="utf-8")))
    assert rows == CODES


def test_every_code_is_used_and_every_used_code_is_listed():
    assert used_codes() == set(CODES)


def test_an_error_tells_the_codes_of_all_its_reasons():
    reasons = [coded("KVP011", "first"), "without a code", coded("KVP004", "second")]
    with pytest.raises(KVPolicyError) as caught:
        refuse("KV policy 'x' cannot run", reasons)
    assert caught.value.codes == codes_in(str(caught.value)) == ("KVP011", "KVP004")
