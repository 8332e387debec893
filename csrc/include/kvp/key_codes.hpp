// Keys in one byte per dimension, and queries to match.
//
// A key k becomes the code u[d] = round((k[d] - center[d]) / (width[d] * scale)) + 64,
// with the mean and the standard deviation of each dimension over the first keys, and one
// scale per key. Codes are 1 to 127. A query q becomes round(q[d] * width[d] / step). Then
//
//     q . (k - center)  ~  step * scale * sum of (u - 64) * query code
//
// and q . center is the same for all keys, so that it does not change their order. Without
// center and width, a few dimensions with large means would take all bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kvp/arena.hpp"
#include "kvp/code_kernels.hpp"
#include "kvp/exponential.hpp"
#include "kvp/index_common.hpp"

namespace kvp::index {

constexpr int kZeroCode = 64, kLargestCode = 63, kLargestQueryCode = 127;
constexpr float kLeastPeak = 1e-30f;

// Center and width of each dimension.
class CodeSpace {
 public:
  std::int64_t dims() const { return static_cast<std::int64_t>(center_.size()); }
  std::int64_t quads() const { return (dims() + kQuad - 1) / kQuad; }
  bool empty() const { return center_.empty(); }
  const float* center() const { return center_.data(); }
  float width(std::int64_t d) const { return width_[static_cast<std::size_t>(d)]; }
  const float* widths() const { return width_.data(); }
  const float* inverse_widths() const { return inverse_width_.data(); }

  // Measures rows [n][dims], n >= 1.
  void fit(const float* rows, std::int64_t n, std::int64_t dims) {
    center_.resize(static_cast<std::size_t>(dims));
    width_.resize(static_cast<std::size_t>(dims));
    for (std::int64_t d = 0; d < dims; ++d) {
      double sum = 0.0, square = 0.0;
      for (std::int64_t i = 0; i < n; ++i) sum += rows[i * dims + d];
      const double mean = sum / static_cast<double>(n);
      for (std::int64_t i = 0; i < n; ++i) {
        const double off = rows[i * dims + d] - mean;
        square += off * off;
      }
      const auto at = static_cast<std::size_t>(d);
      center_[at] = static_cast<float>(mean);
      width_[at] = static_cast<float>(std::sqrt(square / static_cast<double>(n)));
    }
    // A constant dimension gets a width as well: later keys may differ there.
    const float largest = *std::max_element(width_.begin(), width_.end());
    // Far below any key that matters, and large enough that no later key overflows.
    const float least = largest > 0.0f ? std::max(1e-3f * largest, 1e-12f) : 1.0f;
    for (float& width : width_) width = std::max(width, least);
    inverse_width_.resize(width_.size());
    for (std::size_t d = 0; d < width_.size(); ++d)
      inverse_width_[d] = 1.0f / width_[d];
  }

 private:
  std::vector<float> center_, width_, inverse_width_;
};

// Writes the codes of queries [group][dims] to scratch. With the score that a kernel
// computes, query . key ~ steps[g] * score + offsets[g].
inline void encode_queries(const CodeSpace& space, const float* queries,
                           std::int64_t group, CodeScratch& scratch) {
  const std::int64_t dims = space.dims(), padded = space.quads() * kQuad;
  scratch.queries.assign(static_cast<std::size_t>(group * padded), 0);
  scratch.biases.resize(static_cast<std::size_t>(group));
  scratch.steps.resize(static_cast<std::size_t>(group));
  scratch.offsets.resize(static_cast<std::size_t>(group));
  for (std::int64_t g = 0; g < group; ++g) {
    const float* query = queries + g * dims;
    std::int8_t* code = scratch.queries.data() + g * padded;
    float peak = 0.0f, offset = 0.0f;
    for (std::int64_t d = 0; d < dims; ++d) {
      peak = std::max(peak, std::fabs(query[d] * space.width(d)));
      offset += query[d] * space.center()[d];
    }
    const float inverse = peak > 0.0f ? kLargestQueryCode / peak : 0.0f;
    std::int32_t sum = 0;
    for (std::int64_t d = 0; d < dims; ++d) {
      code[d] =
          static_cast<std::int8_t>(std::lrint(query[d] * space.width(d) * inverse));
      sum += code[d];
    }
    scratch.biases[static_cast<std::size_t>(g)] = -kZeroCode * sum;
    scratch.steps[static_cast<std::size_t>(g)] = peak / kLargestQueryCode;
    scratch.offsets[static_cast<std::size_t>(g)] = offset;
  }
}

// Codes of some rows, in blocks (see code_kernels.hpp). The last block is padded with rows
// whose scale is 0. Blocks lie in chunks that never move: growing copies nothing, and at
// most one chunk is partly used. The label of a new row is its place in the block.
class KeyCodes {
 public:
  explicit KeyCodes(Arena& arena) : arena_(&arena), chunks_(arena) {}

  std::int64_t size() const { return size_; }
  std::int64_t blocks() const { return (size_ + kCodeBlock - 1) / kCodeBlock; }

  // Adds rows [n][dims]. All calls need the same space.
  void append(const CodeSpace& space, const float* rows, std::int64_t n) {
    set_shape(space);
    const std::int64_t needed = (size_ + n + kCodeBlock - 1) / kCodeBlock;
    while (chunks_.size() * chunk_blocks_ < needed) {
      auto* chunk = static_cast<std::uint8_t*>(arena_->take(chunk_bytes_));
      std::memset(chunk, 0, chunk_bytes_);
      chunks_.push(chunk);
    }
    // Padded with the center.
    std::vector<float> values(static_cast<std::size_t>(quads_ * kQuad), 0.0f);
    for (std::int64_t i = 0; i < n; ++i) {
      set(space, size_ + i, rows + i * space.dims(), values.data());
    }
    size_ += n;
  }

  // Row `at` becomes the code of row [dims]; at <= size().
  void put(const CodeSpace& space, std::int64_t at, const float* row) {
    if (at == size_) {
      append(space, row, 1);
      return;
    }
    std::vector<float> values(static_cast<std::size_t>(quads_ * kQuad), 0.0f);
    set(space, at, row, values.data());
  }

  // Undoes `permute`.
  void restore_order(std::int64_t first, std::int64_t n) {
    std::vector<std::int32_t> order(static_cast<std::size_t>(n));
    for (std::int64_t i = 0; i < n; ++i) {
      order[static_cast<std::size_t>(label(first + i))] =
          static_cast<std::int32_t>(first + i);
    }
    permute(first, order.data(), n);
    for (std::int64_t row = first; row < first + n; ++row) {
      set_label(row, row % kCodeBlock);
    }
  }

  // row[d] = the key that the code stands for, minus the center.
  void decode(const CodeSpace& space, std::int64_t at, float* row) const {
    const float own_scale = widen(scale_bits(at));
    const std::uint8_t* codes = first_quad(at);
    const float* widths = space.widths();
    const std::int64_t dims = space.dims();
    for (std::int64_t d = 0; d < dims; ++d) {
      const int code = codes[d / kQuad * kQuadBytes + d % kQuad];
      row[d] = static_cast<float>(code - kZeroCode) * own_scale * widths[d];
    }
  }

  // Row first + i becomes what row order[i] was; order is a permutation of
  // [first, first + n), n at most 65536. Its label becomes order[i] - first.
  void permute(std::int64_t first, const std::int32_t* order, std::int64_t n) {
    std::vector<std::uint32_t> codes(static_cast<std::size_t>(n * quads_));
    std::vector<std::uint16_t> scales(static_cast<std::size_t>(n));
    for (std::int64_t i = 0; i < n; ++i) {
      scales[static_cast<std::size_t>(i)] = scale_bits(order[i]);
      const std::uint8_t* quad = first_quad(order[i]);
      for (std::int64_t q = 0; q < quads_; ++q) {
        std::memcpy(codes.data() + i * quads_ + q, quad + q * kQuadBytes, kQuad);
      }
    }
    for (std::int64_t i = 0; i < n; ++i) {
      set_scale(first + i, scales[static_cast<std::size_t>(i)]);
      set_label(first + i, order[i] - first);
      std::uint8_t* quad = first_quad(first + i);
      for (std::int64_t q = 0; q < quads_; ++q) {
        std::memcpy(quad + q * kQuadBytes, codes.data() + i * quads_ + q, kQuad);
      }
    }
  }

  // blocks[i] = block list[i], or block i without a list.
  void point(const std::int32_t* list, std::int64_t count,
             const std::uint8_t** blocks) const {
    for (std::int64_t i = 0; i < count; ++i) {
      blocks[i] = block_at(list != nullptr ? list[i] : i);
    }
  }

  // What a kernel needs to score some blocks.
  CodeRun run(const CodeScratch& scratch, std::int64_t group,
              const std::uint8_t* const* blocks, std::int64_t count, float* scores,
              std::int64_t stride) const {
    return {blocks, count,  quads_, scratch.queries.data(), scratch.biases.data(),
            group,  scores, stride};
  }

  // Label of row j of a block.
  std::int64_t label(const std::uint8_t* block, std::int64_t j) const {
    std::uint16_t bits;
    std::memcpy(&bits, block + label_offset(j), sizeof bits);
    return bits;
  }
  std::int64_t label(std::int64_t row) const {
    return label(block_at(row / kCodeBlock), row % kCodeBlock);
  }

 private:
  friend struct CodeBreaker;

  static constexpr std::int64_t kChunkBytes = 16 * 1024;

  void set_shape(const CodeSpace& space) {
    quads_ = space.quads();
    chunk_blocks_ = std::max<std::int64_t>(kChunkBytes / block_bytes(quads_), 1);
    chunk_bytes_ = static_cast<std::size_t>(chunk_blocks_ * block_bytes(quads_));
  }

  std::uint8_t* block_at(std::int64_t b) const {
    // 32 bits: division is several times faster.
    const auto at = static_cast<std::uint32_t>(b),
               size = static_cast<std::uint32_t>(chunk_blocks_);
    return chunks_[at / size] + at % size * block_bytes(quads_);
  }
  // The row's codes of dimensions 0 to 3; each next quad is kQuadBytes behind.
  std::uint8_t* first_quad(std::int64_t row) const {
    return block_at(row / kCodeBlock) + row % kCodeBlock * kQuad;
  }

  // Offsets in a block.
  std::int64_t scale_offset(std::int64_t j) const {
    return quads_ * kQuadBytes + 2 * j;
  }
  std::int64_t label_offset(std::int64_t j) const {
    return scale_offset(kCodeBlock + j);
  }

  std::uint16_t scale_bits(std::int64_t row) const {
    std::uint16_t bits;
    std::memcpy(&bits, block_at(row / kCodeBlock) + scale_offset(row % kCodeBlock),
                sizeof bits);
    return bits;
  }
  void set_scale(std::int64_t row, std::uint16_t bits) {
    std::memcpy(block_at(row / kCodeBlock) + scale_offset(row % kCodeBlock), &bits,
                sizeof bits);
  }
  void set_label(std::int64_t row, std::int64_t label) {
    const auto bits = static_cast<std::uint16_t>(label);
    std::memcpy(block_at(row / kCodeBlock) + label_offset(row % kCodeBlock), &bits,
                sizeof bits);
  }

  // The smallest bfloat16 number that is at least a value >= 0.
  static std::uint16_t scale_from(float value) {
    return static_cast<std::uint16_t>((bits_of(value) + 0xffffu) >> 16);
  }

  // values: [quads * 4], zero behind the last dimension.
  void set(const CodeSpace& space, std::int64_t at, const float* row, float* values) {
    const std::int64_t dims = space.dims();
    const float *center = space.center(), *inverse_widths = space.inverse_widths();
    float peak = 0.0f;
    for (std::int64_t d = 0; d < dims; ++d) {
      values[d] = (row[d] - center[d]) * inverse_widths[d];
      peak = std::max(peak, std::fabs(values[d]));
    }
    // A key that hardly differs from the center counts as the center.
    const std::uint16_t own_scale =
        peak > kLeastPeak ? scale_from(peak / kLargestCode) : 0;
    const float inverse = peak > kLeastPeak ? 1.0f / widen(own_scale) : 0.0f;
    std::uint8_t* codes = first_quad(at);
    for (std::int64_t q = 0; q < quads_; ++q) {
      std::uint8_t quad[kQuad];
      for (int d = 0; d < kQuad; ++d) {
        // Positive, so that the conversion rounds to the nearest.
        const float code = values[q * kQuad + d] * inverse + (kZeroCode + 0.5f);
        quad[d] = static_cast<std::uint8_t>(static_cast<std::int32_t>(code));
      }
      std::memcpy(codes + q * kQuadBytes, quad, kQuad);
    }
    set_scale(at, own_scale);
    set_label(at, at % kCodeBlock);
  }

  Arena* arena_;  // frees the chunks
  Array<std::uint8_t*> chunks_;
  std::int64_t quads_ = 0, chunk_blocks_ = 1;
  std::size_t chunk_bytes_ = 0;
  std::int64_t size_ = 0;
};

}  // namespace kvp::index
