// Paged keys and values: where pages lie, which pages a sequence has, and where the
// elements of a page lie. All kernels, on CPUs and on CUDA, take these structs.
//
// A page is the slab of one (layer, block, KV head): 2 * block_size * head_dim
// elements, half of them a plane of keys and half a plane of values. The attention
// kernel that reads the pages decides their order, so a table describes each plane:
//
//     rows        offset(s, d) = base + s * slot_stride + d  one row per slot
//     transposed  offset(s, d) = base + d * block_size + s   one column per slot
//     permuted    offset(s, d) = offsets[s * head_dim + d]   any other order
//
// Rows lie without gaps (slot_stride = head_dim, keys before values) or, in vLLM's
// CUDA backends, each slot's key and then its value (slot_stride = 2 * head_dim).
//
// Plain pointers and sizes only: no torch, no Python, no globals, no exceptions.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define KVP_HOST_DEVICE __host__ __device__
#else
#define KVP_HOST_DEVICE
#endif

namespace kvp {

enum class PlaneKind { kRows, kTransposed, kPermuted };

// One half of a page: all keys, or all values, of its slots.
struct Plane {
  const std::int32_t* offsets;  // [block_size * head_dim], within the page
  PlaneKind kind;
  std::int64_t base;         // offset of (slot 0, dim 0)
  std::int64_t slot_stride;  // kRows: elements from one row to the next

  // Whether the plane is one run of rows without gaps.
  bool is_matrix(std::int64_t head_dim) const {
    return kind == PlaneKind::kRows && slot_stride == head_dim;
  }
};

struct PageLayout {
  std::int64_t block_size;  // slots per page
  std::int64_t head_dim;    // elements per key and per value
  Plane keys;
  Plane values;

  std::int64_t plane_elems() const { return block_size * head_dim; }
  std::int64_t page_elems() const { return 2 * plane_elems(); }
};

// All pages of a KV cache and their layout. Element is the type of the elements, or
// an unsigned integer of their size where a kernel only copies bits.
template <typename Element>
struct PagedKV {
  Element* pages;            // page p begins at pages + p * page_stride
  std::int64_t num_pages;    // kernels that check ids on the device read it
  std::int64_t page_stride;  // elements
  PageLayout layout;

  KVP_HOST_DEVICE Element* page(std::int64_t id) const {
    return pages + id * page_stride;
  }
  KVP_HOST_DEVICE std::int64_t block_size() const { return layout.block_size; }
  KVP_HOST_DEVICE std::int64_t head_dim() const { return layout.head_dim; }

  // The same pages as elements of another type of the same size.
  template <typename Other>
  PagedKV<Other> as() const {
    return {static_cast<Other*>(pages), num_pages, page_stride, layout};
  }
};

// Lists of pages, one per sequence (a request's KV head): a row of a matrix each.
template <typename Id>
struct PageTable {
  const Id* ids;  // [rows, pages_per_row]
  std::int64_t rows;
  std::int64_t pages_per_row;

  KVP_HOST_DEVICE const Id* row(std::int64_t sequence) const {
    return ids + sequence * pages_per_row;
  }
};

// Single tokens of paged keys and values: token i lies in slot slots[i] of page
// pages[i].
struct TokenSlots {
  const std::int64_t* pages;  // [n]
  const std::int64_t* slots;  // [n]
  std::int64_t n;
};

// Tokens as rows of a matrix: token i has key row key_rows[i] and value row
// value_rows[i]. The pages of the host tier are such a matrix.
template <typename Element>
struct TokenRows {
  const Element* data;  // [num_rows, head_dim]
  std::int64_t num_rows;
  const std::int64_t* key_rows;
  const std::int64_t* value_rows;
};

// Whether offsets[s * head_dim + d] == base + s * slot_step + d * dim_step for
// every slot s and dimension d. Stops at the first entry that differs.
inline bool is_affine(const std::int32_t* offsets, std::int64_t block_size,
                      std::int64_t head_dim, std::int64_t slot_step,
                      std::int64_t dim_step) {
  const std::int64_t base = offsets[0];
  for (std::int64_t s = 0; s < block_size; ++s) {
    const std::int32_t* row = offsets + s * head_dim;
    for (std::int64_t d = 0; d < head_dim; ++d) {
      if (row[d] != base + s * slot_step + d * dim_step) return false;
    }
  }
  return true;
}

// Describes a table in host memory, so that kernels can take their fast paths.
// Cost: at most two passes over the table; done once per call.
inline Plane make_plane(const std::int32_t* offsets, std::int64_t block_size,
                        std::int64_t head_dim) {
  Plane plane{offsets, PlaneKind::kPermuted, 0, 0};
  if (block_size <= 0 || head_dim <= 0) return plane;
  plane.base = offsets[0];
  const std::int64_t step = block_size > 1 ? offsets[head_dim] - plane.base : head_dim;
  if (is_affine(offsets, block_size, head_dim, step, 1)) {
    plane.kind = PlaneKind::kRows;
    plane.slot_stride = step;
  } else if (is_affine(offsets, block_size, head_dim, 1, block_size)) {
    plane.kind = PlaneKind::kTransposed;
  }
  return plane;
}

inline PageLayout make_layout(const std::int32_t* k_offsets,
                              const std::int32_t* v_offsets, std::int64_t block_size,
                              std::int64_t head_dim) {
  return PageLayout{block_size, head_dim, make_plane(k_offsets, block_size, head_dim),
                    make_plane(v_offsets, block_size, head_dim)};
}

// Describes a table in device memory, which the host does not read: the caller says
// whether it lists rows, from which base and how far apart (slot_stride 0: it does
// not).
inline Plane device_plane(const std::int32_t* offsets, std::int64_t base,
                          std::int64_t slot_stride) {
  return {offsets, slot_stride > 0 ? PlaneKind::kRows : PlaneKind::kPermuted, base,
          slot_stride};
}

}  // namespace kvp
