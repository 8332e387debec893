"""ProtoKV's algorithm 1 (appendix E), line by line, in plain loops and float64.

Slow and simple; shares no code with the package. One KV head at a time. Where the paper
is not specific, it follows the ``ProtoKV`` docstring.
"""

from __future__ import annotations

import math

import torch

Vector = list[float]


def dot(left: Vector, right: Vector) -> float:
    return math.fsum(a * b for a, b in zip(left, right, strict=True))


def norm(vector: Vector) -> float:
    return math.sqrt(dot(vector, vector))


def cosine(left: Vector, right: Vector) -> float:
    """0 where a vector has no direction."""
    size = norm(left) * norm(right)
    return dot(left, right) / size if size > 0 else 0.0


def add(vectors: list[Vector], dimensions: int) -> Vector:
    return [math.fsum(vector[d] for vector in vectors) for d in range(dimensions)]


def l2_norm(vector: Vector) -> Vector | None:
    """None where a prototype does not exist."""
    size = norm(vector)
    return [x / size for x in vector] if size > 0 else None


def chunk_deltas(keys: list[Vector], k: int) -> list[float]:
    """Lines 1 to 5: eq. 10 of every token that lies in a chunk."""
    dims, length = len(keys[0]), len(keys) // k
    deltas = []
    for m in range(k):
        chunk = keys[m * length : (m + 1) * length]
        mu = [x / length for x in add(chunk, dims)]
        sigma = [
            math.sqrt(math.fsum((key[d] - mu[d]) ** 2 for key in chunk) / length)
            for d in range(dims)
        ]
        for key in chunk:
            spread = norm(sigma)
            deltas.append((1 - cosine(key, mu)) / spread if spread > 0 else 0.0)
    return deltas


def top_p(deltas: list[float], p: int) -> set[int]:
    """Line 5: across all chunks; ties to the lower slot."""
    order = sorted(range(len(deltas)), key=lambda t: (-deltas[t], t))
    return set(order[:p])


def chunk_prototypes(keys: list[Vector], k: int, outliers: set[int]) -> list:
    """Line 6, eq. 11."""
    dims, length = len(keys[0]), len(keys) // k
    centers = []
    for m in range(k):
        slots = range(m * length, (m + 1) * length)
        regular = [keys[t] for t in slots if t not in outliers]
        centers.append(l2_norm(add(regular, dims)))
    return centers


def draw_projections(r: int, dims: int, seed: int) -> tuple[list[Vector], Vector]:
    """W and b of eq. 12 as documented: one seeded CPU generator, W first."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(r, dims, generator=generator, dtype=torch.float64)
    b = torch.rand(r, generator=generator, dtype=torch.float64) * 2 * math.pi
    return w.tolist(), b.tolist()


def bucket_of(key: Vector, w: list[Vector], b: Vector, gamma: float, u: int) -> int:
    """Lines 8, 9 and 11: eq. 12 to 14."""
    r = len(w)
    bits = []
    for row, phase in zip(w, b, strict=True):
        phi = math.sqrt(2 / r) * math.cos(gamma * dot(row, key) + phase)
        bits.append(1 if phi > 0 else 0)
    return sum(2 ** (r - i) * bit for i, bit in enumerate(bits, start=1)) % u


def hashed_prototypes(keys: list[Vector], u: int, gamma: float, seed: int) -> list:
    """Lines 8 to 13, eq. 15."""
    dims = len(keys[0])
    r = max(math.ceil(math.log2(u)), 0)
    w, b = draw_projections(r, dims, seed)
    squares = [dot(key, key) for key in keys if any(key)]
    mean_square = math.fsum(squares) / len(squares) if squares else 1.0
    relative = gamma / math.sqrt(mean_square)
    buckets: list[list[Vector]] = [[] for _ in range(u)]
    for key in keys:
        buckets[bucket_of(key, w, b, relative, u)].append(key)
    return [l2_norm(add(members, dims)) for members in buckets]


def assign(keys: list[Vector], prototypes: list) -> list[int]:
    """Lines 15 to 17, eq. 17; ties to the lower prototype."""
    clusters = []
    for key in keys:
        best, best_cosine = 0, -math.inf
        for index, prototype in enumerate(prototypes):
            if prototype is None:
                continue
            value = cosine(key, prototype)
            # Cosines closer than rounding are the same.
            if value > best_cosine + 1e-12:
                best, best_cosine = index, value
        clusters.append(best)
    return clusters


def redistribute(votes: list[float], clusters: list[int]) -> list[float]:
    """Line 20, eq. 18."""
    scores = []
    for cluster in clusters:
        members = [v for v, c in zip(votes, clusters, strict=True) if c == cluster]
        scores.append(math.fsum(members) / len(members))
    return scores


def window_votes(
    queries: torch.Tensor, keys: list[Vector], scale: float
) -> list[float]:
    """Line 19, eq. 4, averaged over the window and the group's heads.

    Args:
        queries: [group, window, head_dim].
        keys: all slots, window included.
    """
    group, window, _ = queries.shape
    prefix = len(keys) - window
    votes = [0.0] * prefix
    for head in queries.double().tolist():
        for i, query in enumerate(head):
            seen = keys[: prefix + i + 1]
            logits = [scale * dot(query, key) for key in seen]
            top = max(logits)
            weights = [math.exp(x - top) for x in logits]
            total = math.fsum(weights)
            for t in range(prefix):
                votes[t] += weights[t] / total / (group * window)
    return votes


def make_prototypes(
    keys: list[Vector], k: int, r: int, gamma: float, seed: int, ablation: str
) -> list:
    """Line 14, eq. 16, and the ablations of section 5.5."""
    u = 2**r
    if ablation == "lsh-only":
        return hashed_prototypes(keys, k + u, gamma, seed)
    if ablation == "chunk-only":
        return chunk_prototypes(keys, min(k + u, len(keys)), set())
    deltas = chunk_deltas(keys, k)
    outliers = top_p(deltas, 3 * u)
    irregular = [keys[t] for t in sorted(outliers)]
    regular = chunk_prototypes(keys, k, outliers)
    return regular + hashed_prototypes(irregular, u, gamma, seed)


def protokv_scores(
    keys: torch.Tensor,
    queries: torch.Tensor,
    scale: float,
    *,
    chunk_size: int,
    max_chunks: int,
    r: int,
    gamma: float,
    seed: int,
    ablation: str,
) -> torch.Tensor:
    """float64 [num_kv_heads, num_slots], ``inf`` in the window.

    Args:
        keys: [num_kv_heads, num_slots, head_dim].
        queries: [num_q_heads, window, head_dim].
    """
    heads, num_slots, _ = keys.shape
    group, window = queries.shape[0] // heads, queries.shape[1]
    prefix = num_slots - window
    k = max(min(prefix // chunk_size, max_chunks), 1)
    rows = []
    for h in range(heads):
        head = keys[h].double().tolist()
        own = queries[h * group : (h + 1) * group]
        votes = window_votes(own, head, scale)
        prototypes = make_prototypes(head[:prefix], k, r, gamma, seed, ablation)
        clusters = assign(head[:prefix], prototypes)
        rows.append(redistribute(votes, clusters) + [math.inf] * window)
    return torch.tensor(rows, dtype=torch.float64)
