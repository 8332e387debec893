// Where the keys of one KV head are, and how to read them.
#pragma once

#include <cstdint>
#include <vector>

#include "kvp/dot_products.hpp"
#include "kvp/quantized_rows.hpp"

namespace kvp::index {

enum class ElementType { kFloat32, kBFloat16 };

// Keys of one KV head: place p is slot p % slots_per_page of the page
// table[p / slots_per_page] (without a table: of page p / slots_per_page).
//
//   offset(p) = page * page_stride + slot * slot_stride        (in elements)
//   element d = base[offset(p) + d * dim_stride]
//
// Covers a plain [n, head_dim] matrix (one page of n slots), the pages of vLLM's
// CUDA backends (dim_stride 1) and of its CPU backend, whose keys are stored
// [head_dim, block_size] (slot_stride 1).
//
// A quantized key is a row of `rows`, at byte offset(p): strides are then in bytes.
struct KeyView {
  const void* base = nullptr;
  ElementType type = ElementType::kFloat32;
  std::int64_t head_dim = 0;
  std::int64_t slots_per_page = 1;
  std::int64_t page_stride = 0;
  std::int64_t slot_stride = 0;
  std::int64_t dim_stride = 1;
  const std::int64_t* table = nullptr;
  std::int64_t num_places = 0;  // readable places, for checks
  QuantizedRows rows;  // of quantized keys, which have no type

  bool quantized() const { return rows.kernels != nullptr; }
  const std::uint8_t* quantized_row(std::int64_t offset) const {
    return static_cast<const std::uint8_t*>(base) + offset;
  }

  // Places and page sizes fit into 32 bits, for which division is several times faster.
  std::int64_t offset(std::int64_t place) const {
    const std::int64_t page =
        static_cast<std::uint32_t>(place) / static_cast<std::uint32_t>(slots_per_page);
    const std::int64_t slot = place - page * slots_per_page;
    return (table != nullptr ? table[page] : page) * page_stride + slot * slot_stride;
  }
};

// For keys that are not quantized.
template <typename Body>
void with_elements(const KeyView& view, const Body& body) {
  if (view.type == ElementType::kFloat32) {
    body(static_cast<const float*>(view.base));
  } else {
    body(static_cast<const std::uint16_t*>(view.base));
  }
}

// row[d] = the key at an offset, in float32. Exact for all element types.
inline void read_key(const KeyView& view, std::int64_t offset, float* row) {
  if (view.quantized()) {
    view.rows.read(view.quantized_row(offset), row);
    return;
  }
  with_elements(view, [&](const auto* base) {
    for (std::int64_t d = 0; d < view.head_dim; ++d) {
      row[d] = widen(base[offset + d * view.dim_stride]);
    }
  });
}

// out[i] = query . key at offsets[i]. `scratch` is [n, head_dim] floats. Keys that are not
// rows in memory are first copied there, so that every layout has the same order of
// additions.
inline void score_keys(const Kernels& kernels, const KeyView& view, const float* query,
                       const std::int64_t* offsets, std::int64_t n, float* scratch,
                       float* out) {
  if (view.dim_stride == 1 && !view.quantized()) {
    with_elements(view, [&](const auto* base) {
      kernels.score(query, view.head_dim, base, offsets, 0, n, out);
    });
    return;
  }
  constexpr std::int64_t kAhead = 12, kLine = 64;
  for (std::int64_t i = 0; i < n; ++i) {
    if (view.quantized() && i + kAhead < n) {
      const std::uint8_t* later = view.quantized_row(offsets[i + kAhead]);
      for (std::int64_t at = 0; at < view.rows.row_bytes(); at += kLine) {
        __builtin_prefetch(later + at);
      }
    }
    read_key(view, offsets[i], scratch + i * view.head_dim);
  }
  kernels.score(query, view.head_dim, scratch, nullptr, view.head_dim, n, out);
}

// The sum of two larger squared norms could overflow float32.
constexpr double kMaxNorm2 = 1e36;

// Squared norm of a row, summed in double precision.
inline float squared_norm(const float* row, std::int64_t dims) {
  double sum = 0.0;
  for (std::int64_t d = 0; d < dims; ++d) {
    sum += static_cast<double>(row[d]) * static_cast<double>(row[d]);
  }
  return static_cast<float>(sum);
}

inline bool usable_norm(float norm2) {  // also false for NaN
  return norm2 <= static_cast<float>(kMaxNorm2);
}

// rows[i] = keys at places [first, first + n), in float32, row_stride apart.
inline void read_keys(const KeyView& view, std::int64_t first, std::int64_t n,
                      std::int64_t row_stride, float* rows) {
  std::int64_t done = 0;
  while (done < n) {
    // Places in one page have a constant step.
    const std::int64_t slot = (first + done) % view.slots_per_page;
    const std::int64_t left = n - done, room = view.slots_per_page - slot;
    const std::int64_t run = left < room ? left : room;
    const std::int64_t offset = view.offset(first + done);
    float* out = rows + done * row_stride;
    done += run;
    if (view.quantized()) {
      for (std::int64_t i = 0; i < run; ++i) {
        read_key(view, offset + i * view.slot_stride, out + i * row_stride);
      }
      continue;
    }
    with_elements(view, [&](const auto* base) {
      if (view.dim_stride == 1) {
        for (std::int64_t i = 0; i < run; ++i) {
          const auto* key = base + offset + i * view.slot_stride;
          float* row = out + i * row_stride;
          for (std::int64_t d = 0; d < view.head_dim; ++d) row[d] = widen(key[d]);
        }
      } else {
        for (std::int64_t d = 0; d < view.head_dim; ++d) {
          const auto* column = base + offset + d * view.dim_stride;
          for (std::int64_t i = 0; i < run; ++i) {
            out[i * row_stride + d] = widen(column[i * view.slot_stride]);
          }
        }
      }
    });
  }
}

// Whether the keys at places [0, n) can be indexed: finite and not too large. If not, *bad
// is the first that cannot. *peak becomes their largest squared norm.
inline bool measure_keys(const KeyView& view, std::int64_t n, float* peak,
                         std::int64_t* bad) {
  constexpr std::int64_t kBlock = 64;
  std::vector<float> rows(static_cast<std::size_t>(kBlock * view.head_dim));
  for (std::int64_t first = 0; first < n; first += kBlock) {
    const std::int64_t count = n - first < kBlock ? n - first : kBlock;
    read_keys(view, first, count, view.head_dim, rows.data());
    for (std::int64_t i = 0; i < count; ++i) {
      const float norm2 = squared_norm(rows.data() + i * view.head_dim, view.head_dim);
      if (!usable_norm(norm2)) {
        *bad = first + i;
        return false;
      }
      *peak = norm2 > *peak ? norm2 : *peak;
    }
  }
  return true;
}

// out[g * stride + i] = query g . key at place first + i, for the exact scan. `scratch` is
// used as in score_keys.
inline void score_run(const Kernels& kernels, const KeyView& view, const float* queries,
                      std::int64_t group, std::int64_t first, std::int64_t n,
                      float* scratch, float* out, std::int64_t stride) {
  const std::int64_t dims = view.head_dim;
  if (view.dim_stride != 1 || view.quantized()) {
    read_keys(view, first, n, dims, scratch);
    for (std::int64_t g = 0; g < group; ++g) {
      kernels.score(queries + g * dims, dims, scratch, nullptr, dims, n,
                    out + g * stride);
    }
    return;
  }
  std::int64_t done = 0;
  while (done < n) {
    const std::int64_t slot = (first + done) % view.slots_per_page;
    const std::int64_t left = n - done, room = view.slots_per_page - slot;
    const std::int64_t run = left < room ? left : room;
    with_elements(view, [&](const auto* base) {
      for (std::int64_t g = 0; g < group; ++g) {
        kernels.score(queries + g * dims, dims, base + view.offset(first + done),
                      nullptr, view.slot_stride, run, out + g * stride + done);
      }
    });
    done += run;
  }
}

}  // namespace kvp::index
