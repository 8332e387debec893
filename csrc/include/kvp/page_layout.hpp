// Where the elements of one page lie.
//
// A page is the slab of one (layer, block, KV head): 2 * block_size * head_dim
// elements, half of them a plane of keys and half a plane of values. Their order
// belongs to the attention kernel that reads them, so it is described by a table
// per plane instead of being assumed:
//
//     rows        offset(s, d) = base + s * slot_stride + d  a row per slot
//     transposed  offset(s, d) = base + d * block_size + s   a column per slot
//     permuted    offset(s, d) = table[s * head_dim + d]     anything else
//
// Rows lie without gaps (slot_stride = head_dim, keys before values) or, in vLLM's
// CUDA backends, each slot's key and then its value (slot_stride = 2 * head_dim).
//
// Plain pointers and sizes only: no torch, no Python, no globals, no exceptions.
#pragma once

#include <cstdint>

namespace kvp {

enum class PlaneKind { kRows, kTransposed, kPermuted };

// One half of a page (all keys or all values of its slots).
struct Plane {
  const std::int32_t* offsets;  // [block_size * head_dim], within the page
  PlaneKind kind;
  std::int64_t base;  // offset of (slot 0, dim 0)
  std::int64_t slot_stride;  // kRows: from one row to the next

  // Whether the plane is one run of rows, without gaps.
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

// Describes a table so that the copy loops can take their fast paths.
// Cost: one pass over the table at most twice; done once per call.
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

}  // namespace kvp
