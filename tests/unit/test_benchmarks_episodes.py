"""Episode switches, counted on constructed runs and on a generated dialogue."""

from __future__ import annotations

import random
from itertools import permutations

import episode_switches as benchmark
import pytest
from fake_encoder import BagOfWords, speak

from vllm_kvplugins.episodes.settings import EpisodeSettings


def run_of(*guides):
    times = [1.0] * (len(guides) - 1)
    return benchmark.Run(0, 8, 2, 2, 10.0, list(guides), times, times, times, times)


def test_switches_are_counted_against_the_query_before():
    run = run_of(0, 0, 1, 1, 0, 2)
    assert run.switches == [0, 0, 1, 1, 2, 3]
    assert run.share == pytest.approx(3 / 5)


def test_the_shuffled_share_is_the_mean_over_all_orders():
    guides = [0, 0, 0, 1, 1, 2]
    orders = [run_of(*order).share for order in permutations(guides)]
    assert run_of(*guides).shuffled_share == pytest.approx(sum(orders) / len(orders))


def test_a_dialogue_s_second_half_is_routed_with_all_before_it():
    rng = random.Random(0)
    first = [
        utterance for topic in ("sea", "tea") for utterance in speak(rng, 8, topic)
    ]
    later = [
        utterance for topic in ("tea", "sea") for utterance in speak(rng, 8, topic)
    ]
    encoder = BagOfWords()
    settings = EpisodeSettings(episodes=2, recluster_growth=benchmark.NEVER)
    run = benchmark.run_dialogue(3, first + later, settings, encoder, 4)
    assert (run.dialogue, run.utterances, run.segments, run.episodes) == (3, 16, 4, 2)
    assert run.guides == [0, 0, 1, 1]
    assert run.switches == [0, 0, 1, 1]
    assert len(run.encode_ms) == len(run.match_ms) == len(run.cpu_ms) == 3
    assert len(run.learn_ms) == 3
    # four segments and a query; then that query as a segment, and the next query
    assert len(encoder.seen) == 5 + 3 * 2


def test_all_queries_count_in_the_last_row():
    table = benchmark.table([run_of(0, 1, 0), run_of(0, 0, 0, 1, 1)])
    cells = [list(column.cells)[-1] for column in table.columns]
    assert cells[4:7] == ["8", "3", "50%"]


def test_the_worst_case_and_every_dialogue_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "switches.svg"
    benchmark.draw([run_of(0, 1, 0), run_of(0, 0, 0, 1)], path)
    text = path.read_text()
    assert "worst case" in text
    assert text.count("dialogue 0") >= 2
    assert "episode switches so far" in text
