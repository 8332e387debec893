"""The page table benchmark builds the tables that it describes."""

from __future__ import annotations

import page_tables
import pytest


@pytest.mark.parametrize("retained", [False, True])
@pytest.mark.parametrize("scopes", [1, page_tables.LAYERS])
def test_tables_have_the_pages_that_were_requested(scopes, retained):
    table = page_tables.builder(2, scopes, 8, retained)()
    assert table.pages.shape == (scopes, 2 * page_tables.HEADS, 8)
    tokens = 8 * page_tables.SIZE - 3
    assert int(table.lengths.max()) == tokens
    assert bool((table.lengths == tokens).all()) == (not retained or scopes == 1)


def test_a_process_answers():
    process = page_tables.child(page_tables.ROOT, 1)
    case = {"scopes": 1, "pages": 8, "retained": True}
    assert all(page_tables.ask(process, case) > 0 for _ in range(2))
    process.communicate()
    assert process.returncode == 0
