"""The zoom of a step, compiled and in torch, against an oracle of loops."""

from __future__ import annotations

import dataclasses

import page_ops
import pytest
import torch
from tiers import tiered

from vllm_kvplugins import ops
from vllm_kvplugins.ops.svd import LowRank
from vllm_kvplugins.ops.zoom import choose_spans
from vllm_kvplugins.ops.zoom_transfer import fetch_spans, pack

SEED = 20261122
DIM, HEADS = 16, 3
DTYPES = [torch.float32, torch.bfloat16]


def vars_of(entries: ops.ZoomEntries) -> tuple[torch.Tensor, ...]:
    return entries.keys, entries.values, entries.bias, entries.owner


class Requests:
    """Requests with entries in reverse order and other requests' entries between
    them.

    Attributes:
        factors: of tokens that all differ.
    """

    def __init__(
        self,
        spans: list[int],
        rooms: list[int],
        dtype: torch.dtype = torch.float32,
        longest: int = 9,
        shortest: int = 1,
        rank: int = DIM,
        rows_if_smaller: bool = False,
    ) -> None:
        self.rank, self.rows_if_smaller = rank, rows_if_smaller
        print("seed", SEED)
        self.rng = torch.Generator().manual_seed(SEED)
        self.spans, self.rooms = spans, rooms
        lengths = (shortest, longest + 1)
        self.sizes = [torch.randint(*lengths, (n,), generator=self.rng) for n in spans]
        table, end = [], 3
        for n, room in zip(reversed(spans), reversed(rooms), strict=True):
            table.insert(0, [end, n, room])
            end += HEADS * (n + room) + 3
        sizes = torch.cat([torch.empty(0, dtype=torch.int64), *self.sizes])
        self.regions = ops.ZoomRegions(
            torch.tensor(table, dtype=torch.int64).view(-1, 3),
            HEADS,
            sizes,
            sizes.float().log(),
        )
        self.factors = [self._factors(sizes, dtype) for sizes in self.sizes]
        self._rows: dict[tuple[int, int], torch.Tensor] = {}
        # unowned entries do not change
        self.entries = ops.ZoomEntries(
            torch.full((end, DIM), torch.nan, dtype=dtype),
            torch.full((end, DIM), torch.nan, dtype=dtype),
            torch.full((end,), 77.0),
            torch.full((end,), 55),
        )
        for i in range(len(spans)):
            bias, owner, keys, values = self.views(i)
            bias[:] = -torch.inf
            bias[:, : spans[i]] = self.sizes[i].float().log()
            owner[:] = -1
            keys[:], values[:] = 0, 0

    def _factors(self, sizes: torch.Tensor, dtype: torch.dtype) -> LowRank:
        rows = torch.randn(2 * HEADS, int(sizes.sum()), DIM, generator=self.rng)
        starts, as_rows = sizes.cumsum(0) - sizes, self.rows_if_smaller
        return ops.truncated_svd(rows, starts, sizes, self.rank, 1.0, dtype, as_rows)

    def views(self, i: int) -> list[torch.Tensor]:
        """Bias, owner, keys and values of a request, KV head by KV head."""
        first, count, room = self.regions.table[i].tolist()
        parts = (getattr(self.entries, n) for n in ("bias", "owner", "keys", "values"))
        run = slice(first, first + HEADS * (count + room))
        return [p[run].view(HEADS, count + room, *p.shape[1:]) for p in parts]

    def draw(self) -> torch.Tensor:
        """Random gates, with ties and zeros."""
        total = HEADS * sum(self.spans)
        gates = torch.randint(0, 40, (total,), generator=self.rng) / 8.0
        return gates.masked_fill(gates < 0.5, -torch.inf)

    def zoom(self, gates: torch.Tensor) -> tuple[int, int]:
        return ops.zoom_spans(self.entries, self.regions, gates, self.factors)

    def step(self, gates: torch.Tensor) -> int:
        """Zoom, and compare with the oracle; returns the number of reconstructed
        tokens.
        """
        expected = [[v.clone() for v in self.views(i)] for i in range(len(self.spans))]
        own, total, zoomed = gates.split([HEADS * n for n in self.spans]), 0, 0
        for i, (bias, owner, keys, values) in enumerate(expected):
            for head in range(HEADS):
                bias[head], owner[head], steps = page_ops.zoom_head(
                    bias[head],
                    owner[head],
                    own[i].view(HEADS, -1)[head],
                    self.sizes[i],
                    self.rooms[i],
                )
                total += len(steps)
                zoomed += int((owner[head] >= 0).sum())
                for entry, (span, token) in steps.items():
                    at = head * self.spans[i] + span
                    for rows, matrix in ((keys, at), (values, at + len(own[i]))):
                        rows[head, entry] = self._token(i, matrix, token)
        nobodys = self._nobodys()
        assert self.zoom(gates) == (total, zoomed)
        for i, parts in enumerate(expected):
            for fetched, right in zip(self.views(i), parts, strict=True):
                assert fetched.equal(right)
        assert self._nobodys().equal(nobodys)
        return total

    def _token(self, i: int, matrix: int, token: int) -> torch.Tensor:
        if (i, matrix) not in self._rows:
            which, dtype = torch.tensor([matrix]), self.entries.keys.dtype
            self._rows[i, matrix] = ops.reconstruct(self.factors[i], which, dtype)
        return self._rows[i, matrix][token]

    def _nobodys(self) -> torch.Tensor:
        """The bytes between the regions."""
        free = torch.ones(len(self.entries.bias), dtype=torch.bool)
        for first, count, room in self.regions.table.tolist():
            free[first : first + HEADS * (count + room)] = False
        parts = vars_of(self.entries)
        return torch.cat([p[free].flatten().view(torch.uint8) for p in parts])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_step_is_what_the_oracle_says(backend, dtype):
    requests = Requests([7, 30, 0, 1, 12], [20, 55, 4, 9, 0], dtype)
    steps = [requests.step(requests.draw()) for _ in range(12)]
    assert min(steps) > 20, "hardly anything changes"
    assert requests.step(torch.full((HEADS * 50,), -torch.inf)) == 0
    for i in range(5):
        bias, owner, *_ = requests.views(i)
        assert bool((owner[:, requests.spans[i] :] < 0).all())
        assert bool((bias[:, : requests.spans[i]] > -torch.inf).all())


class Elsewhere(Requests):
    """Attention reads a second copy of the bias, and the factors lie elsewhere."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        bias_there = self.entries.bias.clone()
        self.entries = dataclasses.replace(self.entries, bias_there=bias_there)

    def zoom(self, gates: torch.Tensor) -> tuple[int, int]:
        places = self.regions.places
        fetched = fetch_spans(
            self.entries, self.regions, places, places, gates, self.factors
        )
        assert self.entries.attended_bias.equal(self.entries.bias)
        return fetched


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_spans_made_elsewhere_are_those_made_here(backend, dtype):
    requests = Elsewhere([7, 30, 0, 1, 12], [20, 55, 4, 9, 0], dtype)
    steps = [requests.step(requests.draw()) for _ in range(12)]
    assert min(steps) > 20, "hardly anything changes"
    assert requests.step(torch.full((HEADS * 50,), -torch.inf)) == 0


def test_a_request_without_factors_is_no_matter_to_others(backend):
    requests = Elsewhere([4, 7], [9, 20])
    none = torch.empty(0, dtype=torch.int64)
    nothing = LowRank(torch.empty(0), torch.zeros(1).long(), none, none, 1)
    gates = requests.draw()
    gates[: HEADS * 4] = -torch.inf
    own, requests.factors[0] = requests.factors[0], nothing
    assert requests.zoom(gates)[0] > 0
    requests.factors[0] = own
    assert requests.step(gates) == 0, "reconstructed again"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_and_factors_are_zoomed_alike(backend, dtype):
    requests = Requests([7, 30], [20, 55], dtype, rank=2, rows_if_smaller=True)
    ranks = torch.cat([factors.ranks for factors in requests.factors])
    assert set(ranks.tolist()) >= {-1, 2}
    assert sum(requests.step(requests.draw()) for _ in range(5)) > 100


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_goes_over_is_what_the_paper_counts(backend, dtype):
    """SeKV, equation 20: r (|S| + d + 1) elements for keys, and for values. Singular
    values are float32, and records of bfloat16 begin at even elements."""
    requests = Requests([7, 30], [20, 55], dtype)
    entries, regions = requests.entries, requests.regions
    fresh, slots, _ = choose_spans(
        entries.bias, entries.owner, regions, requests.draw()
    )
    packed = pack(requests.factors, fresh, torch.device("cpu"))
    elements, ranks = 0, 0
    for request, which in fresh.t().tolist():
        size = int(requests.sizes[request][which % requests.spans[request]])
        for value in (0, 1):
            half = len(requests.factors[request]) // 2
            rank = int(requests.factors[request].ranks[which + value * half])
            elements += rank * (size + DIM + 1)
            ranks += rank
    assert slots.numel() == int(packed.tokens.sum()) // 2
    if dtype == torch.float32:
        assert packed.factors.numel() == elements
    else:
        beyond = packed.factors.numel() - elements
        assert ranks <= beyond <= ranks + len(packed)


@pytest.mark.parametrize("spans", tiered([300, 3000], [300]))
def test_many_spans_of_which_some_change(backend, spans):
    requests = Requests([spans], [spans], longest=12)
    gates = requests.draw()
    first = requests.step(gates)
    gates[::7] = torch.rand(len(gates[::7]), generator=requests.rng) * 6
    again = requests.step(gates)
    assert spans < first
    assert 0 < again < first
    assert requests.step(gates) == 0, "reconstructed again"


def test_ties_go_to_the_lower_number_and_room_is_used(backend):
    requests = Requests([6], [10], longest=4, shortest=4)
    requests.step(torch.ones(HEADS * 6))
    owner = requests.views(0)[1][:, 6:]
    assert owner.tolist() == [[0] * 4 + [1] * 4 + [-1] * 2] * HEADS
    requests.step(torch.tensor([1.0, 1, 1, 2, 2, 3]).repeat(HEADS))
    owner = requests.views(0)[1][:, 6:]
    assert owner.tolist() == [[3] * 4 + [5] * 4 + [-1] * 2] * HEADS


def test_gates_that_are_no_number_are_not_at_all(backend):
    requests = Requests([9, 9], [25, 25])
    gates = requests.draw()
    gates[::3] = torch.nan
    gates[1] = torch.inf
    assert requests.step(gates) > 0
    bias = requests.views(0)[0]
    assert bias[0, 1] == -torch.inf
    assert bool((bias[:, 0:9:3] > -torch.inf).all())
    assert requests.step(torch.full_like(gates, torch.nan)) == 0
    assert requests.step(torch.full_like(gates, torch.inf)) > 0


def test_nothing_to_do(backend):
    nothing = Requests([], [])
    assert nothing.zoom(torch.empty(0)) == (0, 0)
    empty = Requests([0, 0], [0, 5])
    assert empty.zoom(torch.empty(0)) == (0, 0)


def test_no_factors_are_needed_where_nothing_is_new(backend):
    requests = Requests([7], [20])
    gates = requests.draw()
    assert requests.zoom(gates)[0] > 0
    requests.factors = [dataclasses.replace(requests.factors[0], ranks=torch.empty(0))]
    none = torch.empty(0, dtype=torch.int64)
    requests.factors = [LowRank(torch.empty(0), torch.zeros(1).long(), none, none, 1)]
    assert requests.zoom(gates)[0] == 0
    assert requests.zoom(torch.full_like(gates, -torch.inf)) == (0, 0)
    with pytest.raises(ValueError, match=r"factors\[0\] must be of 42 matrices, got 0"):
        requests.zoom(gates)


def test_threads_do_not_change_the_result(compiled):
    before, steps = torch.get_num_threads(), []
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            requests = Requests([4000] * 3, [9000] * 3)
            zoomed = [requests.zoom(requests.draw()) for _ in range(3)]
            parts = [p.flatten().view(torch.uint8) for p in vars_of(requests.entries)]
            steps.append(
                (zoomed, torch.cat([p.flatten().view(torch.uint8) for p in parts]))
            )
    finally:
        torch.set_num_threads(before)
    for zoomed, entries in steps[1:]:
        assert zoomed == steps[0][0]
        assert entries.equal(steps[0][1])


def bad_calls() -> dict[str, tuple[dict[str, torch.Tensor], str]]:
    good = Requests([4, 3], [9, 8])
    table, sizes = good.regions.table, good.regions.sizes
    first = table[1, 0]
    far, wide, behind = table.clone(), table.clone(), table.clone()
    far[0, 0], wide[0, 2], behind[1, 0] = 200, 400, -1
    shared, owner = table.clone(), good.entries.owner.clone()
    shared[0, 0] = first + 1
    owner[first + 3] = 3
    return {
        "far": (
            {"table": far},
            r"regions\[0\] is 3 x \(4 \+ 9\) entries from 200, but",
        ),
        "wide": ({"table": wide}, r"regions\[0\] is 3 x \(4 \+ 400\) entries"),
        "behind": (
            {"table": behind},
            r"regions\[1\] is 3 x \(3 \+ 8\) entries from -1",
        ),
        "shared": ({"table": shared}, "regions overlap at entry"),
        "columns": ({"table": table[:, :2].clone()}, "regions must have 3 columns"),
        "owner": ({"owner": owner}, rf"owner\[{first + 3}\] is span 3, but .* 0 to 2"),
        "sizes": ({"sizes": sizes[1:]}, "sizes must have 7 entries, got 6"),
        "empty": ({"sizes": sizes * 0}, r"sizes\[0\] must be positive, got 0"),
        "logs": ({"log_sizes": torch.zeros(9)}, "log_sizes must have 7 entries, got 9"),
        "gates": ({"gates": torch.zeros(5)}, "gates must have 21 entries, got 5"),
        "double": ({"gates": torch.zeros(21).double()}, "gates must be "),
        "values": ({"values": torch.zeros(5, DIM)}, "values must have shape "),
        "bias": ({"bias": torch.zeros(5)}, "bias must have .* entries, got 5"),
        "half": ({"keys": good.entries.keys.half()}, "must be float32 or bfloat16"),
    }


@pytest.mark.parametrize("name", bad_calls())
def test_bad_arguments(backend, name):
    requests = Requests([4, 3], [9, 8])
    change, message = bad_calls()[name]
    gates = change.pop("gates", requests.draw())
    regions = {k: v for k, v in change.items() if k in ("table", "sizes", "log_sizes")}
    entries = {k: v for k, v in change.items() if k not in regions}
    with pytest.raises(ValueError, match=rf"kvp\.zoom_spans: .*{message}"):
        ops.zoom_spans(
            dataclasses.replace(requests.entries, **entries),
            dataclasses.replace(requests.regions, **regions),
            gates,
            requests.factors,
        )


def test_unsound_factors_change_nothing(backend):
    requests = Requests([4, 3], [9, 8])
    requests.zoom(requests.draw())
    before = [p.clone() for p in vars_of(requests.entries)]
    good = requests.factors[1]
    wrong = [
        (requests.factors[:1], "factors must be of 2 requests, got 1"),
        ([good, good], r"factors\[0\] must be of 24 matrices, got 18"),
    ]
    if backend == "compiled":
        broken = dataclasses.replace(good, factors=good.factors[:-1])
        wrong.append(([requests.factors[0], broken], "matrix 17 is not a record"))
    gates = torch.full((21,), -torch.inf)
    # other spans of both requests, so that all tokens are new
    means = [requests.views(i)[0][:, :n].flatten() for i, n in ((0, 4), (1, 3))]
    bias = torch.cat(means)
    gates[bias > -torch.inf] = 1.0
    gates[20] = 2.0
    assert bias[20] > -torch.inf
    for factors, message in wrong:
        with pytest.raises(ValueError, match=message):
            ops.zoom_spans(requests.entries, requests.regions, gates, factors)
        for current, then in zip(vars_of(requests.entries), before, strict=True):
            assert current.view(torch.uint8).equal(then.view(torch.uint8))


def test_entries_that_contradict_themselves_are_refused(backend):
    """A span that owns tokens although its mean is enabled:

    there is no room for more.
    """
    requests = Requests([2], [9], longest=5)
    bias, owner, *_ = requests.views(0)
    owner[1, 2:] = 0
    gates = torch.full((HEADS * 2,), -torch.inf)
    gates[2] = 1.0
    with pytest.raises(ValueError, match="request 0, head 1 has more tokens than its"):
        requests.zoom(gates)
    assert bool((bias[:, :2] > -torch.inf).all())


def test_the_best_spans_that_fit_together():
    gates = torch.tensor([[0.1, 0.9, 0.5, 0.5], [4.0, 3.0, -torch.inf, 1.0]])
    sizes = torch.tensor([2, 3, 4, 1])

    def chosen(room: int) -> list[list[int]]:
        fetched = ops.within_room(gates, sizes, room)
        return [row.nonzero().squeeze(1).tolist() for row in fetched]

    # a span that does not fit next to the others ends the list; of equal gates, the
    # lower
    # number wins; spans that would never fit are skipped
    assert chosen(0) == [[], []]
    assert chosen(2) == [[3], [0]]
    assert chosen(3) == [[1], [0]]
    assert chosen(6) == [[1], [0, 1, 3]]
    assert chosen(7) == [[1, 2], [0, 1, 3]]
    assert chosen(99) == [[0, 1, 2, 3], [0, 1, 3]]
