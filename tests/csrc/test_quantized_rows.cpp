// Tests of quantized rows (quantized_rows.hpp), and of what reads them: key views and hot
// slots. The oracle is a loop written from the definition, in double precision.
#include <limits>

#include "index_fixtures.hpp"
#include "kvp/hot_set.hpp"

namespace {

using namespace index_test;
using kvp::QuantizedFormat;
using kvp::QuantizedKernels;
using kvp::QuantizedRows;

constexpr Index kDims[] = {2, 3, 5, 31, 32, 33, 54, 63, 64, 65, 80, 96, 100, 128, 130};

// Magnitudes and offsets of several orders.
std::vector<float> random_row(Index dims, std::mt19937& random) {
  std::normal_distribution<float> normal;
  const float scale = std::exp(3.0f * normal(random)), offset = normal(random) * scale;
  std::vector<float> row;
  for (Index d = 0; d < dims; ++d) row.push_back(scale * normal(random) + offset);
  return row;
}

std::vector<std::uint8_t> quantized(const QuantizedRows& rows,
                                    const std::vector<float>& values) {
  const Index dims = rows.format.head_dim;
  const Index n = static_cast<Index>(values.size()) / dims;
  std::vector<std::uint8_t> out(static_cast<std::size_t>(n * rows.row_bytes()));
  for (Index i = 0; i < n; ++i) {
    rows.write(values.data() + i * dims, out.data() + i * rows.row_bytes());
  }
  return out;
}

// Also checks that a row writes and reads no byte beyond its own: the sanitizers see
// the end of both vectors.
std::vector<float> round_trip(const QuantizedRows& rows,
                              const std::vector<float>& values) {
  const std::vector<std::uint8_t> row = quantized(rows, values);
  std::vector<float> out(values.size());
  const Index dims = rows.format.head_dim;
  for (Index i = 0; i < static_cast<Index>(values.size()) / dims; ++i) {
    rows.read(row.data() + i * rows.row_bytes(), out.data() + i * dims);
  }
  return out;
}

// Reads a row from the description of its bytes.
float element(const QuantizedFormat& format, const std::uint8_t* row, Index d) {
  const Index group = d / format.group(), first = group * format.group();
  const Index size = std::min(format.group(), format.head_dim - first);
  const std::uint8_t* codes = row + format.code_bytes(first);
  const Index half = (size + 1) / 2, i = d - first;
  const int code = format.bits == 8 ? codes[i]
                   : i < half       ? codes[i] % 16
                                    : codes[i - half] / 16;
  kvp::GroupScale scale;
  std::memcpy(&scale, row + format.code_bytes(format.head_dim) + 4 * group, 4);
  return static_cast<float>(code + scale.zero) * kvp::widen(scale.step);
}

void test_errors(const QuantizedKernels& kernels, std::mt19937& random) {
  current_case = "errors";
  for (const int bits : {8, 4}) {
    for (const Index dims : kDims) {
      const QuantizedRows rows{{dims, bits}, &kernels};
      const Index group = rows.format.group();
      for (int round = 0; round < 50; ++round) {
        const std::vector<float> values = random_row(dims, random);
        const std::vector<float> actual = round_trip(rows, values);
        const std::vector<std::uint8_t> row = quantized(rows, values);
        for (Index first = 0; first < dims; first += group) {
          const Index stop = std::min(first + group, dims);
          const auto [low, high] =
              std::minmax_element(values.begin() + first, values.begin() + stop);
          const double size =
              std::max(std::fabs(double{*low}), std::fabs(double{*high}));
          const double range = (double{*high} - *low) / ((1 << bits) - 1);
          // The step is at most 1/128 larger than that.
          const double bound =
              std::max(range, size / 32767) * (1 + 1.0 / 128) / 2 + 1e-6 * size;
          for (Index d = first; d < stop; ++d) {
            CHECK(std::fabs(double{actual[d]} - values[d]) <= bound);
            CHECK(actual[d] == element(rows.format, row.data(), d));
          }
        }
      }
    }
  }
}

void test_special_rows(const QuantizedKernels& kernels) {
  current_case = "special rows";
  const float infinity = std::numeric_limits<float>::infinity();
  for (const int bits : {8, 4}) {
    for (const Index dims : kDims) {
      const QuantizedRows rows{{dims, bits}, &kernels};
      for (const float value : {0.0f, -0.0f, 1e-45f, 1e-38f, -1e-36f, 3.0f, -7e36f}) {
        // All elements equal.
        const std::vector<float> values(static_cast<std::size_t>(dims), value);
        for (const float each : round_trip(rows, values)) {
          CHECK(std::fabs(double{each} - value) <=
                std::max(2e-5 * std::fabs(double{value}), 1e-34));
        }
      }
      // Zero stays zero next to others, as the other groups stay what they are.
      for (const float bad : {infinity, -infinity, std::nanf(""), 2e37f, -2e37f}) {
        std::vector<float> values(static_cast<std::size_t>(dims), 1.0f);
        values[0] = 0.0f;
        CHECK(round_trip(rows, values)[0] == 0.0f);
        values[dims - 1] = bad;
        const std::vector<float> actual = round_trip(rows, values);
        const Index first = (dims - 1) / rows.format.group() * rows.format.group();
        for (Index d = 0; d < dims; ++d) CHECK(std::isnan(actual[d]) == (d >= first));
      }
    }
  }
}

void test_all_levels_agree(std::mt19937& random) {
  current_case = "levels";
  for (const int bits : {8, 4}) {
    for (const Index dims : kDims) {
      const std::vector<float> values = random_row(40 * dims, random);
      std::vector<std::uint8_t> bytes;
      std::vector<float> back;
      for (const QuantizedKernels* kernels :
           kvp::runnable_kernels<QuantizedKernels>()) {
        const QuantizedRows rows{{dims, bits}, kernels};
        const std::vector<std::uint8_t> row = quantized(rows, values);
        const std::vector<float> read = round_trip(rows, values);
        if (bytes.empty()) bytes = row, back = read;
        CHECK(row == bytes);
        CHECK(read == back);
      }
    }
  }
}

void test_formats() {
  current_case = "formats";
  for (Index dims = 2; dims <= 512; ++dims) {
    for (const int bits : {8, 4}) {
      QuantizedFormat format;
      CHECK(kvp::format_of(dims, QuantizedFormat{dims, bits}.row_bytes(), &format));
      CHECK(format.bits == bits && format.head_dim == dims);
    }
  }
  QuantizedFormat format;
  CHECK(!kvp::format_of(64, 67, &format));
  CHECK((QuantizedFormat{64, 8}.row_bytes() == 68));
  CHECK((QuantizedFormat{64, 4}.row_bytes() == 40));
}

// The value of an fp8 element, from the definition of the format.
double fp8_value(kvp::Fp8 type, int code) {
  const bool e4m3 = type == kvp::Fp8::kE4m3;
  const int mantissa_bits = e4m3 ? 3 : 2, bias = e4m3 ? 7 : 15;
  const int exponent = (code & 0x7f) >> mantissa_bits;
  const int mantissa = code & ((1 << mantissa_bits) - 1);
  const double sign = (code & 0x80) != 0 ? -1.0 : 1.0;
  if (e4m3 ? (code & 0x7f) == 0x7f : exponent == 31 && mantissa != 0)
    return std::nan("");
  if (!e4m3 && exponent == 31) return sign * std::numeric_limits<double>::infinity();
  const double fraction = std::ldexp(mantissa, -mantissa_bits);
  return exponent == 0 ? sign * std::ldexp(fraction, 1 - bias)
                       : sign * std::ldexp(1.0 + fraction, exponent - bias);
}

// Every byte, at every place of rows of several sizes; the sanitizers see their ends.
void test_fp8_rows(const QuantizedKernels& kernels) {
  current_case = "fp8 rows";
  for (const kvp::Fp8 type : {kvp::Fp8::kE4m3, kvp::Fp8::kE5m2}) {
    for (const Index dims : {1, 3, 16, 31, 64, 100, 128}) {
      const QuantizedRows rows{{dims, 8, type}, &kernels};
      CHECK(rows.row_bytes() == dims);
      for (int first = 0; first < 256; ++first) {
        std::vector<std::uint8_t> row;
        for (Index d = 0; d < dims; ++d) {
          row.push_back(static_cast<std::uint8_t>(first + d));
        }
        std::vector<float> out(row.size());
        rows.read(row.data(), out.data());
        for (Index d = 0; d < dims; ++d) {
          const double right = fp8_value(type, row[d]);
          if (std::isnan(right)) {
            CHECK(std::isnan(out[d]));
          } else {
            CHECK(static_cast<double>(out[d]) == right);
            CHECK(std::signbit(out[d]) == std::signbit(right));
          }
        }
      }
    }
  }
}

// A view of quantized keys in pages of 16 scores what a view of their values does.
void test_key_views(const QuantizedKernels& quantized_kernels, const Kernels& kernels,
                    std::mt19937& random) {
  current_case = "key views";
  constexpr Index kSlots = 16, kGroup = 3;
  for (const int bits : {8, 4}) {
    for (const Index dims : {5, 64, 80}) {
      const QuantizedRows rows{{dims, bits}, &quantized_kernels};
      for (const Index n : {1, 15, 100}) {
        const std::vector<std::uint8_t> row =
            quantized(rows, clustered(n, dims, random));
        const Index pages = (n + kSlots - 1) / kSlots, bytes = rows.row_bytes();
        std::vector<Index> table(static_cast<std::size_t>(pages));
        std::iota(table.begin(), table.end(), 0);
        std::shuffle(table.begin(), table.end(), random);
        KeyView view;
        view.head_dim = dims;
        view.slots_per_page = kSlots;
        view.page_stride = 2 * kSlots * bytes;
        view.slot_stride = bytes;
        view.table = table.data();
        view.num_places = pages * kSlots;
        view.rows = rows;
        std::vector<std::uint8_t> memory(
            static_cast<std::size_t>(pages * view.page_stride));
        std::vector<float> values(static_cast<std::size_t>(n * dims));
        std::vector<Index> offsets;
        for (Index i = 0; i < n; ++i) {
          offsets.push_back(view.offset(i));
          std::copy_n(row.data() + i * bytes, bytes, memory.data() + view.offset(i));
          rows.read(row.data() + i * bytes, values.data() + i * dims);
        }
        view.base = memory.data();
        const KeyView plain = dense(values, dims);
        const std::vector<float> queries = clustered(kGroup, dims, random);
        const auto size = static_cast<std::size_t>(n);
        std::vector<float> scratch(size * dims), right(size * kGroup),
            actual(size * kGroup);
        score_run(kernels, plain, queries.data(), kGroup, 0, n, scratch.data(),
                  right.data(), n);
        score_run(kernels, view, queries.data(), kGroup, 0, n, scratch.data(),
                  actual.data(), n);
        CHECK(actual == right);
        score_keys(kernels, view, queries.data(), offsets.data(), n, scratch.data(),
                   actual.data());
        CHECK(std::equal(right.begin(), right.begin() + n, actual.begin()));
        std::vector<float> all(size * dims), one(static_cast<std::size_t>(dims));
        read_keys(view, 0, n, dims, all.data());
        CHECK(all == values);
        read_key(view, offsets.back(), one.data());
        CHECK(std::equal(one.begin(), one.end(), values.end() - dims));
        float peak = 0.0f;
        Index bad = -1;
        CHECK(measure_keys(view, n, &peak, &bad) && bad < 0 && peak > 0.0f);
      }
    }
  }
}

// Tokens that are copied to hot slots are those that the rows have, in the heap's type.
template <typename Element>
void test_hot_slots(const QuantizedKernels& kernels, std::mt19937& random) {
  current_case = "hot slots";
  constexpr Index kDim = 40, kBlock = 4, kHostPage = 4, kTokens = 16, kHot = 6;
  std::vector<std::int32_t> k(kBlock * kDim), v(kBlock * kDim);
  std::iota(k.begin(), k.end(), 0);
  std::iota(v.begin(), v.end(), kBlock * kDim);
  const kvp::PageLayout layout = kvp::make_layout(k.data(), v.data(), kBlock, kDim);
  for (const int bits : {8, 4}) {
    const QuantizedRows rows{{kDim, bits}, &kernels};
    const std::vector<float> values = random_row(2 * kTokens * kDim, random);
    const std::vector<std::uint8_t> host = quantized(rows, values);
    std::vector<Index> table{2, 0, 3, 1};
    const kvp::HostTokens<std::uint8_t> bytes{host.data(), table.data(), kHostPage,
                                              rows.row_bytes()};
    kvp::QuantizedTokens<Element> tokens(bytes, rows);
    std::vector<Element> heap(2 * 2 * kBlock * kDim);
    const kvp::PagedKV<Element> kv{heap.data(), 2, 2 * kBlock * kDim, layout};
    std::vector<Index> hot{0, 1, 2, 3, 4, 5}, page{0, 0, 0, 0, 1, 1},
        slot{0, 1, 2, 3, 0, 1};
    const std::vector<Index> wanted{15, 7, 9, 6, 8, 10};
    std::vector<std::uint8_t> mark(kTokens);
    const kvp::HotSlots slots{hot.data(), page.data(), slot.data(), kHot};
    CHECK(kvp::fill_hot_slots(tokens, kTokens, wanted.data(), kHot, slots, kv, mark) ==
          kHot);
    for (std::size_t i = 0; i < kHot; ++i) {
      for (int plane = 0; plane < 2; ++plane) {
        std::vector<float> wide(kDim);
        rows.read(
            host.data() + (bytes.row(hot[i]) + plane * kHostPage) * rows.row_bytes(),
            wide.data());
        std::vector<Element> right(kDim);
        kvp::narrow_row(wide.data(), kDim, right.data());
        const Element* actual = heap.data() + page[i] * 2 * kBlock * kDim +
                                plane * kBlock * kDim + slot[i] * kDim;
        CHECK(std::equal(right.begin(), right.end(), actual));
      }
    }
  }
}

}  // namespace

int main() {
  std::mt19937 random(kSeed);
  test_formats();
  test_all_levels_agree(random);
  for (const QuantizedKernels* kernels : kvp::runnable_kernels<QuantizedKernels>()) {
    std::printf("%s\n", kvp::name_of(kernels->simd));
    test_errors(*kernels, random);
    test_special_rows(*kernels);
    test_fp8_rows(*kernels);
    test_hot_slots<std::uint32_t>(*kernels, random);
    test_hot_slots<std::uint16_t>(*kernels, random);
    for (const Kernels* scores : kvp::runnable_kernels<Kernels>()) {
      if (scores->simd == kernels->simd) test_key_views(*kernels, *scores, random);
    }
  }
  return report();
}
