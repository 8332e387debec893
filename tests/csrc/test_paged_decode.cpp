// Mixed-resolution decode attention (paged_decode.hpp) against a softmax in double
// precision, for every set of kernels that this CPU runs.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kvp/paged_decode.hpp"
#include "kvp/paged_decode_check.hpp"

namespace {

using kvp::decode::Call;
using kvp::decode::Kernels;
using kvp::index::ElementType;
using Index = std::int64_t;

constexpr unsigned kSeed = 20261122;
constexpr float kOff = -std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
int failures = 0;
std::string current_case;

#define CHECK(condition)                                                            \
  do {                                                                              \
    if (!(condition)) {                                                             \
      std::printf("%s:%d: %s (case %s, seed %u)\n", __FILE__, __LINE__, #condition, \
                  current_case.c_str(), kSeed);                                     \
      ++failures;                                                                   \
    }                                                                               \
  } while (0)

std::size_t u(Index index) { return static_cast<std::size_t>(index); }

float value_of(float x) { return x; }
float value_of(std::uint16_t x) { return kvp::widen(x); }

// The value of an fp8 element, from the definition of its format.
float fp8_value(kvp::Fp8 type, std::uint8_t code) {
  const int mantissa_bits = type == kvp::Fp8::kE4m3 ? 3 : 2;
  const int bias = type == kvp::Fp8::kE4m3 ? 7 : 15;
  const int exponent = (code & 0x7f) >> mantissa_bits;
  const int mantissa = code & ((1 << mantissa_bits) - 1);
  const int leading = exponent == 0 ? 0 : 1 << mantissa_bits;
  const int power = std::max(exponent, 1) - bias - mantissa_bits;
  const float magnitude = std::ldexp(static_cast<float>(leading + mantissa), power);
  return code < 128 ? magnitude : -magnitude;
}

// Vectors of exactly the given size, so that a sanitizer sees reads past the end.
template <typename Element>
std::vector<Element> elements(const std::vector<float>& values) {
  std::vector<Element> out(values.size());
  for (std::size_t i = 0; i < values.size(); ++i)
    kvp::decode::store(values[i], &out[i]);
  return out;
}

std::vector<float> normal(Index n, std::mt19937& random) {
  std::normal_distribution<float> draw;
  std::vector<float> values(u(n));
  for (float& x : values) x = draw(random);
  return values;
}

enum class Order { kNatural, kTransposed, kPermuted };

struct Shape {
  Index rows, kv_heads, group, dims, slots;
  Order order;
  float sharpness;  // factor of the queries
};

// A call and the memory that it points to.
template <typename Element>
struct Case {
  Shape shape;
  Index sequences, most_pages = 20, num_pages = 23, gap = 5;
  std::vector<std::int32_t> k_offsets, v_offsets, table, lengths;
  std::vector<Element> heap, queries, out, coarse_keys, coarse_values;
  std::vector<float> bias, lse;
  std::vector<Index> starts, counts;

  Case(const Shape& wanted, std::mt19937& random)
      : shape(wanted), sequences(wanted.rows * wanted.kv_heads) {
    const Index dims = shape.dims, slots = shape.slots, plane = dims * slots;
    make_offsets(random);
    heap = elements<Element>(normal(num_pages * (2 * plane + gap), random));
    const Index lengths_of[] = {
        0, 1, slots, 3 * slots + 1, most_pages * slots, most_pages * slots - slots / 2};
    for (Index s = 0; s < sequences; ++s) {
      lengths.push_back(static_cast<std::int32_t>(lengths_of[s % 6]));
      std::vector<std::int32_t> pages(u(num_pages));
      std::iota(pages.begin(), pages.end(), 0);
      std::shuffle(pages.begin(), pages.end(), random);
      // Ids after the last page of a sequence are undefined.
      const Index used = (lengths.back() + slots - 1) / slots;
      for (Index i = used; i < num_pages; ++i) pages[u(i)] = -7;
      table.insert(table.end(), pages.begin(), pages.begin() + most_pages);
      // All entries of sequence 0, which has no tokens, are off.
      counts.push_back(s == 0 ? 4 : s % 3 == 0 ? 0 : s % 3 == 1 ? 5 : 600);
    }
    const Index entries = place_runs();
    std::vector<float> keys = normal(entries * dims, random);
    std::vector<float> values = normal(entries * dims, random);
    for (Index i = 0; i < entries; ++i) {
      const bool off = i >= starts[0] || i % 7 == 3;  // sequence 0 is last
      bias.push_back(off ? kOff : std::log(1.0f + static_cast<float>(i % 40)));
      for (Index d = 0; bias.back() == kOff && d < dims; ++d) {
        keys[u(i * dims + d)] = values[u(i * dims + d)] = kNan;
      }
    }
    coarse_keys = elements<Element>(keys);
    coarse_values = elements<Element>(values);
    std::vector<float> asked = normal(sequences * shape.group * dims, random);
    for (float& x : asked) x *= shape.sharpness;
    queries = elements<Element>(asked);
    out.resize(queries.size());
    lse.resize(u(sequences * shape.group));
  }

  // Runs in reverse order with gaps between them. Returns the number of entries.
  Index place_runs() {
    Index end = 3;
    starts.resize(counts.size());
    for (std::size_t s = counts.size(); s-- > 0; end += counts[s] + 3) starts[s] = end;
    return end;
  }

  void make_offsets(std::mt19937& random) {
    const Index dims = shape.dims, slots = shape.slots, plane = dims * slots;
    std::vector<std::int32_t> places(u(2 * plane));
    std::iota(places.begin(), places.end(), 0);
    if (shape.order == Order::kPermuted) {
      std::shuffle(places.begin(), places.end(), random);
    }
    k_offsets.assign(places.begin(), places.begin() + plane);
    v_offsets.assign(places.begin() + plane, places.end());
    for (Index s = 0; s < slots && shape.order == Order::kTransposed; ++s) {
      for (Index d = 0; d < dims; ++d) {
        k_offsets[u(s * dims + d)] = static_cast<std::int32_t>(d * slots + s);
      }
    }
  }

  Call call() {
    const ElementType type =
        sizeof(Element) == 4 ? ElementType::kFloat32 : ElementType::kBFloat16;
    Call call{};
    call.rows = shape.rows, call.kv_heads = shape.kv_heads, call.group = shape.group;
    call.scale = 1.0f / std::sqrt(static_cast<float>(shape.dims));
    call.queries = queries.data(), call.query_type = type;
    call.kv = {
        heap.data(), num_pages, 2 * shape.dims * shape.slots + gap,
        kvp::make_layout(k_offsets.data(), v_offsets.data(), shape.slots, shape.dims)};
    call.page_type = type;
    call.table = {table.data(), sequences, most_pages};
    call.lengths = lengths.data();
    call.coarse_keys = coarse_keys.data(), call.coarse_values = coarse_values.data();
    call.coarse_type = type;
    call.bias = bias.data(), call.starts = starts.data();
    call.counts = counts.data();
    call.out = out.data(), call.lse = lse.data();
    return call;
  }

  // One query head, from the definition. Returns the log-sum-exp.
  double softmax(Index sequence, Index head, std::vector<double>& output) {
    const Index dims = shape.dims, slots = shape.slots;
    const Call made = call();
    const Element* query = queries.data() + (sequence * shape.group + head) * dims;
    std::vector<double> scores;
    std::vector<std::vector<double>> values;
    const auto add = [&](const auto& key, const auto& value, double more) {
      double score = 0.0;
      std::vector<double> row;
      for (Index d = 0; d < dims; ++d) {
        score += double(value_of(query[d])) * double(value_of(key(d)));
        row.push_back(double(value_of(value(d))));
      }
      scores.push_back(score * double(made.scale) + more);
      values.push_back(row);
    };
    for (Index t = 0; t < lengths[u(sequence)]; ++t) {
      const Index id = table[u(sequence * most_pages + t / slots)];
      const Element* page = heap.data() + id * made.kv.page_stride;
      const Index at = t % slots * dims;
      add([&](Index d) { return page[k_offsets[u(at + d)]]; },
          [&](Index d) { return page[v_offsets[u(at + d)]]; }, 0.0);
    }
    const Index begin = starts[u(sequence)];
    for (Index i = begin; i < begin + counts[u(sequence)]; ++i) {
      if (bias[u(i)] == kOff) continue;
      add([&](Index d) { return coarse_keys[u(i * dims + d)]; },
          [&](Index d) { return coarse_values[u(i * dims + d)]; }, double(bias[u(i)]));
    }
    output.assign(u(dims), 0.0);
    if (scores.empty()) return double(kOff);
    const double peak = *std::max_element(scores.begin(), scores.end());
    double sum = 0.0;
    for (std::size_t i = 0; i < scores.size(); ++i) {
      const double weight = std::exp(scores[i] - peak);
      sum += weight;
      for (Index d = 0; d < dims; ++d) output[u(d)] += weight * values[i][u(d)];
    }
    for (double& x : output) x /= sum;
    return peak + std::log(sum);
  }
};

template <typename Element>
void test_case(const Kernels& kernels, const Shape& shape, std::mt19937& random) {
  Case<Element> one(shape, random);
  const Call call = one.call();
  CHECK(
      kvp::check_page_lists(call.table, call.lengths, shape.slots, one.num_pages).ok());
  kvp::decode::attend_mixed(kernels, call);
  // Scores grow with the queries, and with them their errors.
  const double loose = std::max(1.0, double(shape.sharpness));
  const double allowed = loose * (sizeof(Element) == 4 ? 2e-5 : 2e-2);
  std::vector<double> right;
  for (Index s = 0; s < one.sequences; ++s) {
    for (Index h = 0; h < shape.group; ++h) {
      const Index head = s * shape.group + h;
      const double lse = one.softmax(s, h, right);
      if (lse == double(kOff)) CHECK(one.lse[u(head)] == kOff);
      if (lse != double(kOff)) {
        CHECK(std::abs(double(one.lse[u(head)]) - lse) < 1e-5 * (1.0 + std::abs(lse)));
      }
      for (Index d = 0; d < shape.dims; ++d) {
        const double got = double(value_of(one.out[u(head * shape.dims + d)]));
        CHECK(std::abs(got - right[u(d)]) <= allowed);
        if (lse == double(kOff)) CHECK(got == 0.0);
      }
    }
  }
}

void test_shapes(const Kernels& kernels, std::mt19937& random) {
  for (Order order : {Order::kNatural, Order::kTransposed, Order::kPermuted}) {
    for (Index dims : {3, 20, 64, 80, 128}) {
      for (Index slots : {5, 16, 17, 32}) {
        // All groups with one size, to keep it short under a sanitizer.
        for (Index group : {3, 1, 7}) {
          if (group != 3 && dims != 20 && dims + slots != 96) continue;
          current_case = std::string(kvp::name_of(kernels.simd)) + ", order " +
                         std::to_string(static_cast<int>(order)) + ", dims " +
                         std::to_string(dims) + ", slots " + std::to_string(slots) +
                         ", group " + std::to_string(group);
          const Shape shape{2, 3, group, dims, slots, order, 1.0f};
          test_case<float>(kernels, shape, random);
          test_case<std::uint16_t>(kernels, shape, random);
        }
      }
    }
  }
  current_case = "a page larger than a tile, sharp";
  test_case<float>(kernels, {1, 6, 2, 16, 300, Order::kTransposed, 30.0f}, random);
  test_case<float>(kernels, {1, 6, 2, 16, 320, Order::kTransposed, 30.0f}, random);
}

// Pages of fp8 elements give the bits that pages of their values give.
void test_fp8(const Kernels& kernels, std::mt19937& random) {
  for (kvp::Fp8 type : {kvp::Fp8::kE4m3, kvp::Fp8::kE5m2}) {
    for (Order order : {Order::kNatural, Order::kTransposed, Order::kPermuted}) {
      for (Index slots : {5, 32, 300}) {
        current_case = std::string(kvp::name_of(kernels.simd)) + ", fp8 " +
                       std::to_string(static_cast<int>(type)) + ", order " +
                       std::to_string(static_cast<int>(order)) + ", slots " +
                       std::to_string(slots);
        Case<float> one({2, 3, 3, 20, slots, order, 0.01f}, random);
        // Vectors of exactly this size; each finite element occurs.
        std::vector<std::uint8_t> codes(one.heap.size());
        for (std::size_t i = 0; i < codes.size(); ++i) {
          const auto code = static_cast<std::uint8_t>(random());
          codes[i] = code % 128 < 124 ? code : 0;
          one.heap[i] = fp8_value(type, codes[i]);
        }
        kvp::decode::attend_mixed(kernels, one.call());
        const std::vector<float> right = one.out, right_lse = one.lse;
        std::fill(one.out.begin(), one.out.end(), kNan);
        Call call = one.call();
        call.kv.pages = codes.data(), call.page_fp8 = type;
        kvp::decode::attend_mixed(kernels, call);
        CHECK(one.out == right);
        CHECK(one.lse == right_lse);
      }
    }
  }
}

// Slots after the last token do not matter; attended tokens do.
void test_nan(const Kernels& kernels, std::mt19937& random) {
  current_case = std::string(kvp::name_of(kernels.simd)) + ", NaN";
  for (Order order : {Order::kNatural, Order::kTransposed, Order::kPermuted}) {
    const Shape shape{1, 4, 3, 64, 32, order, 1.0f};
    Case<float> one(shape, random);
    const Index dims = shape.dims,
                last = 3 * shape.slots;  // the last slot of sequence 3
    float* page = one.heap.data() +
                  one.table[u(3 * one.most_pages + 3)] * one.call().kv.page_stride;
    one.lengths = {0, 0, 0, static_cast<std::int32_t>(last + 1)};
    for (Index i = dims; i < dims * shape.slots; ++i) {
      page[one.k_offsets[u(i)]] = page[one.v_offsets[u(i)]] = kNan;
    }
    kvp::decode::attend_mixed(kernels, one.call());
    const std::vector<float> right = one.out;
    const float* query = one.queries.data() + 3 * shape.group * dims;
    for (Index i = dims; i < dims * shape.slots; ++i) {
      page[one.k_offsets[u(i)]] = std::copysign(1e4f, query[i % dims]);  // a peak
    }
    kvp::decode::attend_mixed(kernels, one.call());
    CHECK(one.out == right);
    const auto finite = [](float x) { return std::isfinite(x); };
    const auto first = one.out.begin() + 3 * shape.group * dims;
    CHECK(std::all_of(first, one.out.end(), finite));
    CHECK(std::isfinite(one.lse.back()));
    page[one.k_offsets[0]] = kNan;  // the first slot is the last token
    kvp::decode::attend_mixed(kernels, one.call());
    CHECK(std::none_of(first, one.out.end(), finite));
    CHECK(std::isnan(one.lse.back()));
  }
}

// A sequence gives the same bits alone and among others.
void test_alone(const Kernels& kernels, std::mt19937& random) {
  current_case = std::string(kvp::name_of(kernels.simd)) + ", alone";
  Case<float> one({2, 3, 3, 64, 32, Order::kTransposed, 1.0f}, random);
  kvp::decode::attend_mixed(kernels, one.call());
  const std::vector<float> together = one.out;
  Call call = one.call();
  const Index s = 5, elems = call.group * call.head_dim();
  call.rows = call.kv_heads = 1;
  call.queries = one.queries.data() + s * elems;
  call.table = {call.table.row(s), 1, one.most_pages};
  call.lengths += s, call.starts += s, call.counts += s;
  std::vector<float> alone(u(elems)), lse(3);
  call.out = alone.data(), call.lse = lse.data();
  kvp::decode::attend_mixed(kernels, call);
  CHECK(std::equal(alone.begin(), alone.end(), together.begin() + s * elems));
}

void test_checks() {
  current_case = "checks";
  using kvp::Fault;
  const std::int32_t ids[] = {4, 9, -1, 2, 5, 8}, lengths[] = {5, 12};
  const kvp::PageTable<std::int32_t> table{ids, 2, 3};
  kvp::Status status = kvp::check_page_lists(table, lengths, 4, 10);
  CHECK(status.ok());  // the -1 is after the last page of sequence 0
  status = kvp::check_page_lists(table, lengths, 4, 8);
  CHECK(status.fault == Fault::kPageOutOfRange && status.index == 1 &&
        status.value == 9);
  const std::int32_t long_ones[] = {5, 13}, negative[] = {-1, 12};
  status = kvp::check_page_lists(table, long_ones, 4, 10);
  CHECK(status.fault == Fault::kLengthOutOfRange && status.index == 1 &&
        status.value == 13);
  status = kvp::check_page_lists(table, negative, 4, 10);
  CHECK(status.fault == Fault::kLengthOutOfRange && status.index == 0);
  const std::int32_t full[] = {9, 12};
  status = kvp::check_page_lists(table, full, 4, 10);
  CHECK(status.fault == Fault::kPageOutOfRange && status.index == 2 &&
        status.value == -1);
  const auto fault_at = [](std::vector<Index> starts, std::vector<Index> counts) {
    const kvp::Status found = kvp::check_runs(starts.data(), counts.data(),
                                              static_cast<Index>(starts.size()), 5);
    return found.ok() ? Index{-1} : found.index;
  };
  constexpr Index kHuge = std::numeric_limits<Index>::max();
  CHECK(fault_at({3, 0, 5, 1}, {2, 5, 0, 3}) == -1);  // any order, also shared
  CHECK(fault_at({0, -1}, {2, 2}) == 1);
  CHECK(fault_at({0, 4}, {2, 2}) == 1);
  CHECK(fault_at({6, 0}, {0, 2}) == 0);
  CHECK(fault_at({0, 1}, {2, -1}) == 1);
  CHECK(fault_at({0, 1}, {2, kHuge}) == 1);
  const float bias[] = {0.0f, kOff, 3.0f, -kOff, kNan};
  const Index starts[] = {1, 4, 0}, within[] = {2, 0, 3}, beyond[] = {2, 1, 4};
  CHECK(kvp::check_bias(bias, starts, within, 3).ok());  // other entries are not read
  status = kvp::check_bias(bias, starts, beyond, 3);
  CHECK(status.fault == Fault::kBiasNotFinite && status.index == 4);
  CHECK(kvp::check_bias(bias, starts + 2, beyond + 2, 1).index == 3);
}

}  // namespace

int main() {
  std::printf("seed %u\n", kSeed);
  std::mt19937 random(kSeed);
  for (const Kernels* kernels : kvp::runnable_kernels<Kernels>()) {
    std::printf("%s\n", kvp::name_of(kernels->simd));
    test_shapes(*kernels, random);
    test_fp8(*kernels, random);
    test_nan(*kernels, random);
    test_alone(*kernels, random);
  }
  test_checks();
  std::printf("%d failure(s)\n", failures);
  return failures != 0;
}
