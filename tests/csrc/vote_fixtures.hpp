// Requests whose slots get votes, and their votes in double precision.
#pragma once

#include <cmath>
#include <cstdio>
#include <limits>
#include <type_traits>

#include "kvp/page_votes.hpp"
#include "page_fixtures.hpp"

namespace vote_test {

using namespace page_test;
using kvp::BFloat16;
using kvp::Float16;
using kvp::page_votes::Call;

struct Shape {
  Index kv_heads, group, num_queries, slots, block_size, head_dim;
  Order order;
  bool own, holes;
};

template <typename Element>
Element element_of(float value) {
  if constexpr (std::is_same_v<Element, float>) return value;
  if constexpr (std::is_same_v<Element, BFloat16>) {
    return {static_cast<std::uint16_t>(kvp::round_to_bfloat16(value))};
  } else if constexpr (std::is_same_v<Element, Float16>) {
    // By search: every float16 from 0 to 8 in its order.
    std::uint16_t low = 0, high = 0x4800;
    while (low + 1 < high) {
      const auto middle = static_cast<std::uint16_t>((low + high) / 2);
      (kvp::to_float(Float16{middle}) <= std::fabs(value) ? low : high) = middle;
    }
    return {static_cast<std::uint16_t>(low | (value < 0 ? 0x8000 : 0))};
  }
}

// Slots in random order; holes hold NaN, which no query may see. Queries are the newest
// tokens, or, with keys of their own, come after all slots.
template <typename Element>
struct Request {
  Shape shape;
  Tables tables;
  std::vector<Element> heap, queries, own;
  Indices table, positions, query_positions;
  Index page_stride, pages_per_head;

  Request(const Shape& s, std::mt19937& random) : shape(s) {
    std::normal_distribution<float> normal;
    tables = make_tables(s.order, s.block_size, s.head_dim, random);
    pages_per_head = (s.slots + s.block_size - 1) / s.block_size + 1;
    page_stride = 2 * s.block_size * s.head_dim + 16;
    Indices pages(static_cast<std::size_t>(s.kv_heads * pages_per_head + 2));
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), random);
    table.assign(pages.begin() + 1, pages.begin() + 1 + s.kv_heads * pages_per_head);
    const auto fill = [&](std::vector<Element>& all, Index n, float size) {
      for (Index i = 0; i < n; ++i) {
        all.push_back(element_of<Element>(size * normal(random)));
      }
    };
    const float not_a_number = std::numeric_limits<float>::quiet_NaN();
    heap.assign(pages.size() * static_cast<std::size_t>(page_stride),
                element_nan(not_a_number));
    fill(queries, s.kv_heads * s.group * s.num_queries * s.head_dim, 2.0f);
    if (s.own) fill(own, s.kv_heads * s.num_queries * s.head_dim, 1.0f);
    for (Index h = 0; h < s.kv_heads; ++h) {
      Indices order(static_cast<std::size_t>(s.slots));
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random);
      for (Index i = 0; i < s.slots; ++i) {
        const bool hole = s.holes && random() % 5 == 0;
        positions.push_back(hole ? -1 : order[i]);
        for (Index d = 0; d < s.head_dim && !hole; ++d) {
          key(h, i, d) = element_of<Element>(normal(random));
        }
      }
    }
    const Index first = s.own ? s.slots : s.slots - s.num_queries;
    for (Index i = 0; i < s.num_queries; ++i) query_positions.push_back(first + i);
  }

  static Element element_nan(float value) {
    if constexpr (std::is_same_v<Element, float>) {
      return value;
    } else {
      return {0x7fff};
    }
  }

  Element& key(Index head, Index slot, Index d) {
    const Index page = table[head * pages_per_head + slot / shape.block_size];
    return heap[page * page_stride +
                tables.keys[slot % shape.block_size * shape.head_dim + d]];
  }

  Call<Element> call(bool largest, float* out) const {
    return {shape.kv_heads,
            shape.group,
            shape.num_queries,
            shape.slots,
            1.0f / std::sqrt(static_cast<float>(shape.head_dim)),
            largest,
            queries.data(),
            query_positions.data(),
            own.empty() ? nullptr : own.data(),
            {heap.data(), static_cast<Index>(heap.size()) / page_stride, page_stride,
             kvp::make_layout(tables.keys.data(), tables.values.data(),
                              shape.block_size, shape.head_dim)},
            {table.data(), shape.kv_heads, pages_per_head},
            positions.data(),
            out};
  }

  std::size_t votes() const {
    return static_cast<std::size_t>(shape.kv_heads * shape.group * shape.slots);
  }

  // The votes by their definition.
  std::vector<double> expected(bool largest) {
    const Shape& s = shape;
    const double scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
    std::vector<double> out(votes());
    for (Index h = 0; h < s.kv_heads * s.group; ++h) {
      const Index kv = h / s.group, extra = s.own ? s.num_queries : 0;
      for (Index q = 0; q < s.num_queries; ++q) {
        std::vector<double> scores;
        double peak = -std::numeric_limits<double>::infinity(), sum = 0.0;
        for (Index i = 0; i < s.slots + extra; ++i) {
          const Index o = i - s.slots;
          const Index at = o < 0 ? positions[kv * s.slots + i] : query_positions[o];
          double score = 0.0;
          for (Index d = 0; d < s.head_dim; ++d) {
            const Element k =
                o < 0 ? key(kv, i, d) : own[(kv * s.num_queries + o) * s.head_dim + d];
            const Element x = queries[(h * s.num_queries + q) * s.head_dim + d];
            score += static_cast<double>(kvp::to_float(x)) * kvp::to_float(k);
          }
          const bool seen = at >= 0 && at <= query_positions[q];
          scores.push_back(seen ? score * scale
                                : -std::numeric_limits<double>::infinity());
          peak = std::max(peak, scores.back());
        }
        for (const double score : scores) sum += std::exp(score - peak);
        for (Index i = 0; i < s.slots && sum > 0.0; ++i) {
          const double weight = std::exp(scores[i] - peak) / sum;
          double& vote = out[h * s.slots + i];
          vote = largest ? std::max(vote, weight) : vote + weight;
        }
      }
    }
    return out;
  }
};

// The largest difference.
inline double error_of(const std::vector<float>& votes,
                       const std::vector<double>& expected) {
  double largest = 0.0;
  for (std::size_t i = 0; i < votes.size(); ++i) {
    const double error = std::fabs(votes[i] - expected[i]);
    largest = error <= largest ? largest : error;  // also if error is NaN
  }
  return largest;
}

inline std::vector<Shape> shapes() {
  std::vector<Shape> made;
  for (const Order order : kOrders) {
    made.push_back({2, 3, 7, 100, 16, 64, order, false, false});
    made.push_back({1, 2, 5, 70, 16, 24, order, true, true});
    made.push_back({2, 1, 1, 33, 5, 3, order, false, true});
    made.push_back({1, 1, 40, 200, 128, 80, order, true, false});
  }
  made.push_back({1, 2, 3, 3, 16, 64, Order::kNatural, false, false});
  made.push_back({1, 1, 1, 1, 1, 1, Order::kNatural, false, false});
  made.push_back({1, 1, 2, 4, 4, 8, Order::kNatural, true, true});
  return made;
}

}  // namespace vote_test
